"""Stock vLLM."""
