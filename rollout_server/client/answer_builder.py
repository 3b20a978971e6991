"""One answer from the chunks of one server or several: its tokens, the versions they are of, and what to ask next."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    FinishReason,
    GenerateRequest,
    Generation,
    Span,
    extend_spans,
)
from penstock.rollout_server.routed_experts import rows_between
from penstock.transfer_queue import RoutedExperts


class AnswerBuilder:
    """One request's tokens so far, from one server or several. `next_request` comes before each server's chunks."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.resumed = 0
        self.continued_over_update = False
        self.finish_reason: FinishReason | None = None
        self._experts: list[tuple[int, list[str]]] = []
        """(tokens so far, blocks whose rows end with the pass that sampled the last of them)"""
        self._server_versions: set[int] = set()
        self._resumes = False
        self._before_server = (0, 0, False)

    def next_request(self, deadline_s: float) -> GenerateRequest:
        """The request for the next server: the context holds the prompt and all tokens sampled so far."""
        self._server_versions, self._resumes = set(), bool(self.token_ids)
        self._before_server = (len(self.token_ids), self.resumed, self.continued_over_update)
        if not self.token_ids:
            return self.request.model_copy(update={"deadline_s": deadline_s})
        remaining = self.request.sampling.max_new_tokens - len(self.token_ids)
        sampling = self.request.sampling.model_copy(update={"max_new_tokens": remaining})
        context = [*self.request.token_ids, *self.token_ids]
        change = {"token_ids": context, "sampling": sampling, "deadline_s": deadline_s}
        if self.request.routed_experts_from is not None:
            # What is missing of the tokens so far stays unknown: this server's weights may be others.
            change["routed_experts_from"] = len(context) - 1
        return self.request.model_copy(update=change)

    def add(self, chunk: Chunk) -> Chunk | None:
        """Adds `chunk`; returns what the reader of this answer gets, None if it holds nothing new."""
        if chunk.token_ids and self._resumes:
            self.resumed, self._resumes = self.resumed + 1, False
        extend_spans(self.spans, chunk.version_spans, len(self.token_ids))
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.routed_experts:
            self._experts.append((len(self.token_ids), chunk.routed_experts))
        self._server_versions.update(version for version, _, _ in chunk.version_spans)
        self.continued_over_update |= len(self._server_versions) > 1
        # "abort" comes from the engine, not from the policy: the answer continues at another server.
        self.finish_reason = None if chunk.finish_reason == "abort" else chunk.finish_reason
        if not chunk.token_ids and not chunk.routed_experts and self.finish_reason is None:
            return None
        return chunk.model_copy(update={"finish_reason": self.finish_reason})

    def take_back(self) -> int:
        """Removes what the current server sent, whose versions it disproved; returns how many tokens."""
        count, self.resumed, self.continued_over_update = self._before_server
        removed = len(self.token_ids) - count
        del self.token_ids[count:], self.logprobs[count:]
        self.spans = [(version, start, min(end, count)) for version, start, end in self.spans if start < count]
        self._experts = [(tokens, blocks) for tokens, blocks in self._experts if tokens <= count]
        self.finish_reason = None
        return removed

    def finish_by_content(self) -> bool:
        """Ends an answer whose tokens show that it is whole; returns whether they do.

        A server may die between the last token and its finish reason. Called only once the server is gone: until then
        its report may disprove the versions of its tokens.
        """
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def build(self) -> Generation:
        """The finished answer."""
        assert self.finish_reason is not None
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            version_spans=self.spans,
            finish_reason=self.finish_reason,
            continued_over_update=self.continued_over_update,
            resumed=self.resumed,
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> RoutedExperts | None:
        """Experts of all positions from the requested one to the last but one. Raises `EngineError` for bad rows."""
        done = self.request.routed_experts_from
        if done is None or not self._experts:
            return None
        parts: list[NDArray[Any]] = []
        try:
            for tokens, blocks in self._experts:
                end = len(self.request.token_ids) + tokens - 1
                if (rows := rows_between(blocks, end, done)) is not None:
                    parts.append(rows)
                    done = end
            missing = len(self.request.token_ids) + len(self.token_ids) - 1 - done
            if parts and missing > 0:
                parts.append(np.zeros((missing, *parts[0].shape[1:]), dtype=parts[0].dtype))
            return np.concatenate(parts) if parts else None
        except ValueError as error:  # also where two servers report different numbers of layers
            raise EngineError(str(error)) from error
