"""Task folders of Harbor and Terminal-Bench as a dataset, and the proof that each can be solved."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
