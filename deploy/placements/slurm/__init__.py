"""Runs under Slurm: one readable batch script for a run, one for what joins it later."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
