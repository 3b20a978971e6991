"""Plumbing that every folder needs; it knows nothing of the domain and imports nothing of ours.

http         bearer tokens, body limits, the error body, OpenAPI, uvicorn from start to stop
files        atomic writes, fsync, JSON lines, file locks
process      parent death, guarded commands, groups and trees of processes
backoff      pauses between attempts, retry
registry     implementations by name, dotted paths, options checked against annotations
tracing      OpenTelemetry spans, their export, trace context over HTTP
prometheus   metrics of a component, families of collectors, GET /metrics
concurrency  tasks that end together
guard        the program that ends a command with its owner; run as a file

Names are imported on first use: ``from penstock.common import FileLock`` loads no web framework. Other folders import
from ``penstock.common`` or from ``penstock.common.<module>``: both are its face.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
