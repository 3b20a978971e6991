"""Data sets with verl's columns, made without a download or from files that a user has: `penstock data ...`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
