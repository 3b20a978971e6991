"""Rows of repositories to repair: converted from SWE-bench, SWE-Gym and R2E, or made by breaking small packages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
