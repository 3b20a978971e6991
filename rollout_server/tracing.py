"""OpenTelemetry spans for who asks and who answers; nothing at all, not even an import, where they are off.

agent worker     episode ─► turn ─► generate ─── traceparent ───► rollout server: sample
                                └─► tool ─► sandbox        reward

A role that is told to (`deploy.telemetry.spans`) installs a tracer once, at its start. Which span is around the running
code is this module's own context variable; OpenTelemetry's is set too, for spans of users' own instrumented code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.rollout_server.protocol import Chunk, GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

HEADER = "traceparent"
MOST_TEXT = 32_000
"""Characters of a prompt, an answer or a tool's result that a span holds."""
GEN_AI = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "tool": "gen_ai.tool.name",
    "operation": "gen_ai.operation.name",
}
"""Names of OpenTelemetry's semantic conventions; every other fact is ``penstock.NAME``."""


@dataclass(slots=True)
class Tracing:
    """`tracer` None: off."""

    tracer: Tracer | None = None
    common: Mapping[str, str] = field(default_factory=dict)
    """Attributes of every span."""
    with_text: bool = False
    """Prompts, answers, tool arguments and results too."""


TRACING = Tracing()
_HERE: ContextVar[Context | None] = ContextVar("span around the running code", default=None)


def install(tracer: Tracer | None, common: Mapping[str, str] | None = None, *, with_text: bool = False) -> None:
    """From now on spans are made, of new episodes and requests; None: no more."""
    TRACING.tracer, TRACING.common, TRACING.with_text = tracer, dict(common or {}), with_text


class OpenSpan:
    """A span that has begun. `end` is its last call."""

    __slots__ = ("_span", "context")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self.context = context

    def note(self, **facts: Any) -> None:
        """Attributes; None is left out, and other things than numbers and texts are told as text."""
        self._span.set_attributes(_attributes(facts))

    def text(self, **texts: str) -> None:
        """Attributes that are there only where texts are asked for."""
        if TRACING.with_text:
            self.note(**{name: value[:MOST_TEXT] for name, value in texts.items()})

    @property
    def with_text(self) -> bool:
        """Whether `text` does anything."""
        return TRACING.with_text

    def fail(self, cause: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, cause))

    def end(self, at_unix_ns: int | None = None) -> None:
        self._span.end(at_unix_ns)

    @property
    def traceparent(self) -> str:
        return carrier(self.context).get(HEADER, "")


class NoSpan:
    """In place of one where there is none."""

    with_text = False

    def note(self, **facts: Any) -> None:
        """Nobody listens."""

    def text(self, **texts: str) -> None:
        """Nobody listens."""


NO_SPAN = NoSpan()


def begin(
    name: str, parent: Context | None, facts: Mapping[str, Any] | None = None, *, server: bool = False
) -> OpenSpan:
    """A span under `parent`; None: the first of a trace. Only while a tracer is installed."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    assert TRACING.tracer is not None, "spans are off"
    kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
    # An empty context, not None: else whatever span is open in OpenTelemetry's own context would be the parent.
    under = Context() if parent is None else parent
    attributes = {**TRACING.common, **_attributes(facts or {})}
    span = TRACING.tracer.start_span(name, context=under, kind=kind, attributes=attributes)
    return OpenSpan(span, trace.set_span_in_context(span, under))


@contextmanager
def inside(span: OpenSpan) -> Iterator[OpenSpan]:
    """Code of the block runs under `span`, which is ended with it; an exception is its failure."""
    from opentelemetry import context

    ours, theirs = _HERE.set(span.context), context.attach(span.context)
    try:
        yield span
    except BaseException as error:
        span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        context.detach(theirs)
        _HERE.reset(ours)
        span.end()


def here() -> Context | None:
    """Of the span around the running code."""
    return _HERE.get()


def carrier(context: Context | None) -> dict[str, str]:
    """HTTP headers that carry `context` to another process."""
    if context is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context)
    return headers


async def answered(
    chunks: AsyncGenerator[Chunk], request: GenerateRequest, traceparent: str | None, server: str
) -> AsyncGenerator[Chunk]:
    """`chunks`, in a span of the server's under the one that asked."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({HEADER: traceparent}) if traceparent else None
    asked = {"operation": "text_completion", "input_tokens": len(request.token_ids)}
    facts = {**asked, "episode": request.episode_id or None, "server_name": server}
    span = begin("sample", parent, facts, server=True)
    tokens, versions, reason = 0, set[int](), "broken"
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
                versions |= {version for version, _, _ in chunk.version_spans}
                reason = chunk.finish_reason or reason
                yield chunk
    except Exception as error:
        span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        span.note(output_tokens=tokens, finish_reason=reason, **versions_of(versions))
        span.end()


def versions_of(versions: set[int]) -> dict[str, int]:
    """``version``, the newest, and ``version_oldest`` where it is another."""
    if not versions:
        return {}
    newest, oldest = max(versions), min(versions)
    return {"version": newest} if newest == oldest else {"version": newest, "version_oldest": oldest}


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    known = ((GEN_AI.get(name) or f"penstock.{name}", value) for name, value in facts.items() if value is not None)
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in known}
