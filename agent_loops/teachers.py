"""Teachers: servers that say how likely they hold each token of a finished episode (on-policy distillation).

trajectory ─► teacher of its data source ─► per segment: ids in, logprobs of the same ids out ─► `teacher_logprobs`
                                                         with `top_k`, in place of each sampled one
                                                         its k likeliest ids out ─► `teacher_top_ids`, `…_logprobs`

`prompt_logprobs` has the requests and answers; which of them a server knows is found out at the first one.
Asked by the agent worker (or gateway) between reward and `complete`, so that what is trained on is recorded: a replayed
step has the same numbers, and the trainer waits for no teacher. A teacher that fails is asked again, with pauses, until
`deadline_s`; then the episode ends as ``infra_error(teacher)`` and is tried again. A failed row gets no
made-up number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.agent_loops.config import TeacherConfig, entry_of
from penstock.agent_loops.errors import AgentError, InfraFailure
from penstock.agent_loops.prompt_logprobs import (
    MALFORMED,
    MOST_ANSWER_BYTES,
    PromptForm,
    PromptLogprobs,
    answer_bytes,
    forms_for,
    read_prompt,
)
from penstock.agent_loops.tracing import span
from penstock.common import Backoff, bearer_headers, gather_or_cancel, retry
from penstock.tools import MAX_ANSWER_BYTES, JsonClient, ToolInfraError, ToolUnavailable
from penstock.transfer_queue import Segment, Task, Trajectory

COMPONENT = "teacher"
log = logging.getLogger(__name__)
TURN_S = 1800.0
BACKOFF = Backoff(0.5, 30.0, jitter=(0.5, 1.0))
PROBE = "The teacher reads 12+34=46, naïve façade, 東京, x**2 != y\n\treturn None"


class BadTeacher(AgentError):
    """The server cannot teach this model. `fix` is the remedy."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class NoPromptLogprobs(ToolInfraError):
    """The answer has no logprobs of the prompt, or of other ids."""

    def __init__(self, reason: str) -> None:
        super().__init__(COMPONENT, reason)


class Teacher:
    """One server. `close` gives its connections back."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        self._url = config.url.rstrip("/").removesuffix("/v1")
        self._http = JsonClient(COMPONENT, config.timeout_s)
        self._turns = asyncio.Semaphore(config.concurrency)
        self._model = config.model
        self._form: PromptForm | None = None

    async def judge(self, ids: Sequence[int], sampled: Sequence[int] = ()) -> PromptLogprobs:
        """Returns the logprobs of ids [L] and, with a `top_k`, the likeliest ids in the places `sampled` [S].

        Raises `InfraFailure`.
        """
        try:
            async with self._turn(), asyncio.timeout(self._config.deadline_s):
                return await retry(
                    lambda: self._attempt(ids, sampled),
                    BACKOFF,
                    retries=self._config.retries,
                    on=ToolUnavailable,
                    at_least_s=lambda error: error.after_s,
                )
        except ToolInfraError as error:
            raise InfraFailure(COMPONENT, error.reason) from error
        except TimeoutError as error:
            reason = f"{self._url}: no logprobs within {self._config.deadline_s:g} s (agent.teachers.*.deadline_s)"
            raise InfraFailure(COMPONENT, reason) from error

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Waiting for others' requests is load, no failure of the teacher: it has a deadline apart from its own."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turns.acquire()
        except TimeoutError as error:
            reason = f"{self._url}: no turn within {TURN_S:g} s (agent.teachers.*.concurrency)"
            raise InfraFailure(COMPONENT, reason) from error
        try:
            yield
        finally:
            self._turns.release()

    async def close(self) -> None:
        await self._http.close()

    async def check(self, encoded: Sequence[int], highest: int, longest: int) -> str:
        """Checks the server and returns a description of it for people.

        Args:
            encoded: the student's ids of `PROBE`.
            highest: the student's highest token id.
            longest: tokens of the longest row, rollout.max_model_len.

        Raises `BadTeacher`: not reached, another vocabulary, no logprobs of prompts, too short a context.
        """
        try:
            entry = await self._entry()
            compared = await self._check_vocabulary(encoded)
            self._check_top_k(highest, longest)
            await self._ask_in_known_form(encoded, [len(encoded) - 1])
        except ToolUnavailable as error:
            raise BadTeacher(error.reason, "start the server, or correct agent.teachers.*.url") from error
        except ToolInfraError as error:
            raise BadTeacher(error.reason, _fix_of(error, self._config.top_k)) from error
        try:
            # Last of all: SGLang ends at an id that its model does not have.
            await self._ask_in_known_form([*encoded, highest], [len(encoded)])
        except ToolInfraError as error:
            fix = f"the model's highest token id is {highest}: take a teacher whose vocabulary has it; is it still up?"
            raise BadTeacher(error.reason, fix) from error
        room = entry.get("max_model_len")
        if isinstance(room, int) and room <= longest:
            raise BadTeacher(
                f"{self._url} reads {room} tokens, rollout.max_model_len is {longest}",
                f"serve the teacher with a context of {longest + 1} or more, or lower rollout.max_model_len",
            )
        summary = f"{self._model} at {self._url}, {'same ids' if compared else 'ids not compared: no /tokenize'}"
        top_k = self._config.top_k  # a likeliest id takes 8 bytes in a segment: id and logprob
        return f"{summary}, top_k {top_k}: {8 * top_k} bytes more per sampled token" if top_k else summary

    def _check_top_k(self, highest: int, longest: int) -> None:
        """Arguments as of `check`. Raises `BadTeacher`."""
        top_k = self._config.top_k
        if top_k > highest + 1:
            raise BadTeacher(
                f"agent.teachers.*.top_k is {top_k}, the vocabulary has {highest + 1} ids",
                f"set agent.teachers.*.top_k to {highest + 1} or less; 8 to 64 have nearly all of a teacher's mass",
            )
        if (size := answer_bytes(longest, top_k)) > MOST_ANSWER_BYTES:
            raise BadTeacher(
                f"{top_k} ids for each of {longest} tokens make an answer of about {size >> 20} MiB, more than the "
                f"{MOST_ANSWER_BYTES >> 20} MiB that are read",
                "lower agent.teachers.*.top_k or rollout.max_model_len",
            )

    async def _attempt(self, ids: Sequence[int], sampled: Sequence[int]) -> PromptLogprobs:
        try:
            return await self._ask_in_known_form(ids, sampled)
        except ToolUnavailable as error:
            log.warning("teacher: %s", error.reason)
            raise

    async def _ask_in_known_form(self, ids: Sequence[int], sampled: Sequence[int]) -> PromptLogprobs:
        """Raises `ToolInfraError`."""
        if self._form is not None:
            return await self._ask(self._form, ids, sampled)
        refusals = []
        for form in forms_for(self._config.top_k):
            try:
                logprobs = await self._ask(form, ids, sampled)
            except ToolUnavailable:
                raise  # another form would not be answered either
            except ToolInfraError as error:
                refusals.append(f"{form.name}: {error.reason}")
            else:
                self._form = form
                return logprobs
        raise NoPromptLogprobs(f"{self._url} gives no logprobs of a prompt ({'; '.join(refusals)})")

    async def _ask(self, form: PromptForm, ids: Sequence[int], sampled: Sequence[int]) -> PromptLogprobs:
        if not self._model:
            await self._entry()
        top_k = self._config.top_k
        most = max(MAX_ANSWER_BYTES, min(answer_bytes(len(ids), top_k), MOST_ANSWER_BYTES))
        answer = await self._post(form.path, form.body(self._model, ids, top_k), most)
        try:
            # In a thread: of a long row with a top k it takes seconds, in which leases must be renewed.
            return await asyncio.to_thread(read_prompt, form, answer, ids, sampled, top_k)
        except MALFORMED as error:
            raise NoPromptLogprobs(f"{self._url}: {type(error).__name__}: {error}") from error

    async def _entry(self) -> Mapping[str, Any]:
        """The server's entry of the model in /v1/models. Raises `ToolInfraError`."""
        answer = await self._http.ask("GET", f"{self._url}/v1/models", headers=self._headers())
        try:
            entries = {str(entry["id"]): entry for entry in answer["data"]}
            self._model = self._model or next(iter(entries))
            return dict(entries.get(self._model, {}))
        except (LookupError, TypeError, StopIteration) as error:
            raise ToolInfraError(COMPONENT, f"{self._url}/v1/models lists no model") from error

    async def _check_vocabulary(self, encoded: Sequence[int]) -> bool:
        """Returns False if the route does not exist. Raises `ToolInfraError`, and `BadTeacher` if its ids differ."""
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        try:
            answer = await self._post("tokenize", body)
        except ToolUnavailable:
            raise
        except ToolInfraError as error:
            if any(f"HTTP {status}" in error.reason for status in (404, 405)):
                return False
            raise
        if list(answer.get("tokens") or ()) != list(encoded):
            raise BadTeacher(
                f"{self._url} reads other token ids than the model: their vocabularies differ",
                "a teacher must have the tokenizer of `model`: take one of the same family",
            )
        return True

    async def _post(self, path: str, body: Mapping[str, Any], most_bytes: int = MAX_ANSWER_BYTES) -> Any:
        url = f"{self._url}/{path}"
        return await self._http.ask("POST", url, headers=self._headers(), body=dict(body), most_bytes=most_bytes)

    def _headers(self) -> dict[str, str]:
        return bearer_headers(os.environ.get(self._config.key_variable, ""))


class Teachers:
    """The teachers of a run by data source, shared by all episodes of a process."""

    def __init__(self, configs: Mapping[str, TeacherConfig]) -> None:
        self._teachers = {pattern: Teacher(config) for pattern, config in configs.items()}

    def of(self, data_source: str) -> Teacher | None:
        """Exact names before patterns, these in their order; None: it has no teacher."""
        return entry_of(self._teachers, data_source)

    async def annotate(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """With what the teacher says in every segment; unchanged without a teacher, and in evaluations.

        Raises `InfraFailure`.
        """
        teacher = self.of(task.data_source)
        if teacher is None or task.split != "train":
            return trajectory
        if trajectory.images is not None:
            reason = "the episode has images, and a teacher reads ids alone: take the source out of agent.teachers"
            raise InfraFailure(COMPONENT, reason)
        began = time.monotonic()
        with span(COMPONENT):
            segments = await gather_or_cancel([_annotated(teacher, segment) for segment in trajectory.segments])
        metrics = {**trajectory.metrics, "teacher_latency_s": time.monotonic() - began}
        return replace(trajectory, segments=segments, metrics=metrics)

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.close()


async def _annotated(teacher: Teacher, segment: Segment) -> Segment:
    sampled = np.flatnonzero(segment.response_mask)
    values = np.zeros(len(segment.response_ids), dtype=np.float32)
    if not len(sampled):
        return replace(segment, teacher_logprobs=values)
    end = int(sampled[-1]) + 1  # what was observed after the last sampled token needs no judgement
    ids = np.concatenate([segment.prompt_ids, segment.response_ids[:end]]).tolist()
    places = sampled + len(segment.prompt_ids)
    judgement = await teacher.judge(ids, places.tolist())
    values[sampled] = judgement.logprobs[places]
    return replace(
        segment,
        teacher_logprobs=values,
        teacher_top_ids=judgement.top_ids,
        teacher_top_logprobs=judgement.top_logprobs,
    )


def _fix_of(error: ToolInfraError, top_k: int) -> str:
    if "max allowed" in error.reason:  # vLLM's words
        return f"serve the teacher with `--max-logprobs {top_k}` or more, or lower agent.teachers.*.top_k"
    if "HTTP 401" in error.reason or "HTTP 403" in error.reason:
        return "the server refuses the key: set the environment variable that agent.teachers.*.key_variable names"
    logprobs = "the likeliest ids in a prompt's places" if top_k else "logprobs of prompts"
    return f"serve the teacher with vLLM, SGLang or `penstock teacher-server`, which give {logprobs}"
