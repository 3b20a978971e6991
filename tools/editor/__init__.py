"""The `editor` tool: view and change the files of the episode's box, with a way back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
