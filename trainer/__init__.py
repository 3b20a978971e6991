"""The trainer: batches from the queue, advantages, losses, FSDP2, checkpoints, weights published."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
