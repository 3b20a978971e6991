"""Engines: the processes that sample tokens, each behind the `Engine` protocol."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
