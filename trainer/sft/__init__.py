"""Supervised fine-tuning with the trainer's engine, packs and checkpoints."""
