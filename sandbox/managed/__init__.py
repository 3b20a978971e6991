"""Boxes of a provider: Kubernetes, E2B, Daytona, Modal, each one file behind `ManagedApi`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
