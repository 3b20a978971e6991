"""Trajectories, journal entries and tasks as bytes: `trajectories` says what is stored, `packing` and `columns` how."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
