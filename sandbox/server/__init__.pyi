from .app import build_app as build_app
from .callers import callers_of as callers_of
from .metrics import Metrics as Metrics
from .parts import Parts as Parts
from .pool import BoxPool as BoxPool
from .serving import serve as serve
from .slots import Slots as Slots
