"""Checks before a run costs anything: `penstock run` refuses a recipe that fails them, `penstock doctor` runs all."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
