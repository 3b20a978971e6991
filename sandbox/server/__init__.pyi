from .app import build_app as build_app
from .app import serve as serve
from .callers import callers_of as callers_of
from .metrics import SandboxMetrics as SandboxMetrics
from .pool import BoxPool as BoxPool
from .pool import Slots as Slots
from .routes import ServerState as ServerState
