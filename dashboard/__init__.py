"""The page of a run: its pipeline, curves, trajectories and dead letters, in a browser."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
