"""Rewards in the box: rules, programs run on test cases, reward models and judges. See docs/guide/reward.md."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
