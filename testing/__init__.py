"""Stand-ins for tests: a queue in memory, engines without a model, fake sandboxes, and scripted policies.

Users test their own loops, tools and rewards with them. Nothing below `deploy` imports this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
