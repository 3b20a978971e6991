from .app import build_app as build_app
from .app import serve as serve
from .metrics import SandboxMetrics as SandboxMetrics
