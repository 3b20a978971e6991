"""Environments of others as agent loops: `reset` and `step`, in a process per episode or on a server."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
