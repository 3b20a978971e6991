"""Messages to token ids and back: the model's chat template, spliced onto verbatim ids."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
