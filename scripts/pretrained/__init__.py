"""Figures of a pretrained model: SmolLM2-135M-Instruct."""
