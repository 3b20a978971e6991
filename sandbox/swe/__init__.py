"""Repositories to repair: a task's snapshot in a box, the model's patch out of it, hidden tests in a fresh one."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
