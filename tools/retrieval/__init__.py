"""A retrieval server: BM25 over a corpus of passages, in the shape that Search-R1's server has."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
