"""docs/models.md: which families of models train, publish and take LoRA, as trying tiny ones shows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
