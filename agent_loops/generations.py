"""An engine's answer at the edge: checked, cut where a stop string ended it, and as the journal keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.agent_loops.errors import InfraFailure, TokenMismatch
from penstock.rollout_server import Chunk, FinishReason, Generation
from penstock.transfer_queue import JournalEntry, JournalKind

LOGPROB_EPSILON = 1e-4
"""A log-softmax in low precision may end this far above 0."""


def check_generation(generation: Generation, min_version: int) -> None:
    """Invariant 1 at the edge. Raises `TokenMismatch` naming what does not fit, `InfraFailure` for an aborted call."""
    ids, logprobs = generation.token_ids, generation.logprobs
    if generation.finish_reason == "abort":
        raise InfraFailure("rollout", "the engine aborted the call")
    if not ids:
        raise TokenMismatch("rollout", "the engine returned no tokens")
    if len(ids) != len(logprobs):
        raise TokenMismatch("rollout", f"{len(ids)} token ids but {len(logprobs)} logprobs")
    bad = [value for value in logprobs if not math.isfinite(value) or value > LOGPROB_EPSILON]
    if bad:
        raise TokenMismatch("rollout", f"logprob {bad[0]} is not a finite number below 0")
    _check_spans(generation.version_spans, len(ids), min_version)


def _check_spans(spans: Sequence[tuple[int, int, int]], length: int, min_version: int) -> None:
    position = 0
    for version, start, end in spans:
        if start != position or end <= start:
            raise TokenMismatch("rollout", f"version spans {list(spans)} do not cover {length} tokens once")
        if version < min_version:
            raise TokenMismatch("rollout", f"tokens of version {version}, below the episode's floor {min_version}")
        position = end
    if position != length:
        raise TokenMismatch("rollout", f"version spans {list(spans)} do not cover {length} tokens once")


def first_tokens(chunk: Chunk, count: int) -> Chunk:
    """`chunk` cut behind its first `count` tokens, as the last one of an answer that a stop string ended."""
    spans = [(version, start, min(end, count)) for version, start, end in chunk.version_spans if start < count]
    return Chunk(
        token_ids=chunk.token_ids[:count], logprobs=chunk.logprobs[:count], version_spans=spans, finish_reason="stop"
    )


def to_entry(generation: Generation, asked: tuple[int, int], note: Mapping[str, Any]) -> JournalEntry:
    """What the journal keeps of an answer; `note` joins its data."""
    return JournalEntry(
        kind=JournalKind.SAMPLED,
        context_len=asked[0],
        context_hash=asked[1],
        ids=np.array(generation.token_ids, dtype=np.int32),
        logprobs=np.array(generation.logprobs, dtype=np.float32),
        version_spans=np.array(generation.version_spans, dtype=np.int32).reshape(-1, 3),
        data={
            "finish_reason": generation.finish_reason,
            "continued_over_update": generation.continued_over_update,
            "resumed": generation.resumed,
            **note,
        },
    )


def from_entry(entry: JournalEntry) -> Generation:
    """The answer that `to_entry` wrote down."""
    assert entry.ids is not None
    assert entry.logprobs is not None
    assert entry.version_spans is not None
    reason: FinishReason = entry.data["finish_reason"]
    spans = [(int(version), int(start), int(end)) for version, start, end in entry.version_spans]
    return Generation(
        token_ids=entry.ids.tolist(),
        logprobs=entry.logprobs.tolist(),
        version_spans=spans,
        finish_reason=reason,
        continued_over_update=bool(entry.data.get("continued_over_update")),
        resumed=int(entry.data.get("resumed", 0)),
    )
