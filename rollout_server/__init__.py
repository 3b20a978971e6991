"""Rollout servers: engines that sample tokens, the sidecars that own them, the weights they pull, routing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
