"""Version spans: (policy version, start, end) rows over token positions, and how they are put together."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.rollout_server.protocol import Chunk

Span = tuple[int, int, int]


def extend_spans(spans: list[Span], more: Iterable[Span], offset: int) -> None:
    """Append `more`, shifted by `offset` positions, joining neighbours of one version. `spans` is changed in place."""
    for version, start, end in more:
        if spans and spans[-1][0] == version and spans[-1][2] == start + offset:
            spans[-1] = (version, spans[-1][1], end + offset)
        else:
            spans.append((version, start + offset, end + offset))


def slice_spans(cuts: list[tuple[int, int]], start: int, end: int) -> list[Span]:
    """Spans of positions `start … end`, counted from `start`; `cuts` are (first position, version), ascending."""
    spans: list[Span] = []
    for i, (first, version) in enumerate(cuts):
        last = cuts[i + 1][0] if i + 1 < len(cuts) else end
        low, high = max(first, start), min(last, end)
        if low < high:
            spans.append((version, low - start, high - start))
    return spans


def join_chunks(left: Chunk, right: Chunk) -> Chunk:
    """One chunk that says what both say, in order."""
    spans = list(left.version_spans)
    extend_spans(spans, right.version_spans, len(left.token_ids))
    # Both sides were checked when they were made; doing it again costs more than all else here.
    return Chunk.model_construct(
        token_ids=left.token_ids + right.token_ids,
        logprobs=left.logprobs + right.logprobs,
        version_spans=spans,
        finish_reason=right.finish_reason,
    )
