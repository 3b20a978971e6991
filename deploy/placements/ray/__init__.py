"""A run's roles as actors of a Ray cluster: `penstock run RECIPE --on ray`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
