"""A run in containers: `penstock compose init` makes a folder that `docker compose up` starts; see docs/compose.md."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
