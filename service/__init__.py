"""A training service: clients train and sample adapters of one model over HTTP, as Tinker's SDK does."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
