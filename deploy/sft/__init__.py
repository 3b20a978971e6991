"""`penstock sft`: conversations of files, runs and policies, the process that trains on them, and its ranks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
