"""Task folders of Harbor and Terminal-Bench: read as they are, opened in a box, graded as Harbor's verifier does."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
