"""The queue between rollout and training: tasks, leases, turn journal, trajectories, steps, versions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
