"""The names under which other folders still import HTTP plumbing; `penstock.common` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from penstock.common import LimitBody, add_error_handlers, error_response, opens, url_host
from penstock.common import RequireToken as _RequireToken
from penstock.common.prometheus import CONTENT_TYPE as PROMETHEUS
from penstock.common.prometheus import METRICS_PATH as METRICS

__all__ = [
    "METRICS", "PROMETHEUS", "HttpServer", "LimitBody", "OpensMetrics", "RequireToken", "add_error_handlers",
    "error_response", "url_host",
]  # fmt: skip


class OpensMetrics:
    """`token` opens ``/metrics``."""

    def __init__(self, token: str) -> None:
        self.token = token


class RequireToken(_RequireToken):
    """With one token and the metrics' own."""

    def __init__(self, app: ASGIApp, token: str, also: OpensMetrics | None = None) -> None:
        super().__init__(app, opens(token, {METRICS: also.token} if also else None))


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
