"""A run as a trace for Perfetto or Chrome: what every role did, when (`penstock trace`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
