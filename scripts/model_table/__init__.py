"""docs/models.md: which families of models train, publish and take LoRA, as trying tiny ones shows."""
