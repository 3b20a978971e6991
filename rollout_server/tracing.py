"""The names under which other folders still import tracing; `penstock.common` has them."""

from penstock.common.tracing import _TRACING as TRACING
from penstock.common.tracing import NO_SPAN, NoSpan, OpenSpan
from penstock.common.tracing import current_context as here
from penstock.common.tracing import install_tracer as install
from penstock.common.tracing import start_span as begin
from penstock.common.tracing import use_span as inside

__all__ = ["NO_SPAN", "TRACING", "NoSpan", "OpenSpan", "begin", "here", "inside", "install"]
