"""What a run tells monitors: metrics of each role for Prometheus, spans of episodes for OpenTelemetry."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
