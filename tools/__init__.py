"""Tools that agents call, and the parsers that find the calls in what a model wrote."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
