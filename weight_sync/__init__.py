"""Policy weights on their way from the trainer to rollout servers: manifests, checksums, deltas, transports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
