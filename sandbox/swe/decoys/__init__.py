"""Hidden tests with wrong expectations: a patch that passes those too has forged its results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
