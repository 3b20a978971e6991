"""The engine on transformers: continuous batching in a process of our own."""
