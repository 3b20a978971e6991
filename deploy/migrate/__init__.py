"""From other frameworks' settings to a recipe: names as data (`names/`), what must be computed as rules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
