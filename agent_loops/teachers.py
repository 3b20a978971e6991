"""Teachers: servers that say how likely they hold each token of a finished episode (on-policy distillation).

trajectory ─► teacher of its data source ─► per segment: ids in, logprobs of the same ids out ─► `teacher_logprobs`

    POST /v1/completions {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": 0}              vLLM, teacher-server
    POST /v1/completions {"prompt": [ids], "max_tokens": 1, "echo": true, "logprobs": 1}       SGLang and others

Asked by the agent worker (or gateway) between reward and `complete`, so that what is trained on is recorded: a replayed
step has the same numbers, and the trainer waits for no teacher. A teacher that fails is asked again, with pauses, until
`deadline_s`; then the episode ends as ``infra_error(teacher)`` and is tried again. It never has a number of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.agent_loops.config import TeacherConfig, entry_of
from penstock.agent_loops.errors import AgentError, InfraFailure
from penstock.agent_loops.tracing import span
from penstock.common import Backoff, gather_or_cancel, retry
from penstock.tools import JsonClient, ToolInfraError, ToolUnavailable
from penstock.transfer_queue import Segment, Task, Trajectory

COMPONENT = "teacher"
log = logging.getLogger(__name__)
TURN_S = 1800.0
BACKOFF = Backoff(0.5, 30.0, jitter=(0.5, 1.0))
LOWEST = -100.0
"""Servers write −inf in their own ways (vLLM: −9999); all of them become this."""
PROBE = "The teacher reads 12+34=46, naïve façade, 東京, x**2 != y\n\treturn None"
Form = Literal["prompt_logprobs", "echo"]
FORMS: Mapping[Form, Mapping[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    "echo": {"echo": True, "logprobs": 1},
}
"""How servers are asked for the logprobs of a prompt."""


class BadTeacher(AgentError):
    """The server cannot teach this model. `fix` says what to do."""

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
        self._form: Form | None = None

    async def logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """ids [L] → [L], each given the ids before it; the first is 0. Raises `InfraFailure`."""
        try:
            async with self._turn(), asyncio.timeout(self._config.deadline_s):
                return await retry(
                    lambda: self._attempt(ids),
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
        """What the server is, for people.

        Args:
            encoded: the student's ids of `PROBE`.
            highest: the student's highest token id.
            longest: tokens of the longest row, rollout.max_model_len.

        Raises `BadTeacher`: not reached, another vocabulary, no logprobs of prompts, too short a context.
        """
        try:
            entry = await self._entry()
            compared = await self._check_vocabulary(encoded)
            await self._ask_in_known_form(encoded)
        except ToolUnavailable as error:
            raise BadTeacher(error.reason, "start the server, or correct agent.teachers.*.url") from error
        except ToolInfraError as error:
            raise BadTeacher(error.reason, _fix_of(error)) from error
        await self._check_highest(encoded, highest)
        room = entry.get("max_model_len")
        if isinstance(room, int) and room <= longest:
            raise BadTeacher(
                f"{self._url} reads {room} tokens, rollout.max_model_len is {longest}",
                f"serve the teacher with a context of {longest + 1} or more, or lower rollout.max_model_len",
            )
        return f"{self._model} at {self._url}, {'same ids' if compared else 'ids not compared: no /tokenize'}"

    async def _check_highest(self, encoded: Sequence[int], highest: int) -> None:
        """Last of all: SGLang ends at an id that its model does not have. Raises `BadTeacher`."""
        try:
            await self._ask_in_known_form([*encoded, highest])
        except ToolInfraError as error:
            fix = f"the model's highest token id is {highest}: take a teacher whose vocabulary has it; is it still up?"
            raise BadTeacher(error.reason, fix) from error

    async def _attempt(self, ids: Sequence[int]) -> NDArray[np.float32]:
        try:
            return await self._ask_in_known_form(ids)
        except ToolUnavailable as error:
            log.warning("teacher: %s", error.reason)
            raise

    async def _ask_in_known_form(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Raises `ToolInfraError`."""
        if self._form is not None:
            return await self._ask(self._form, ids)
        refusals = []
        for form in FORMS:
            try:
                found = await self._ask(form, ids)
            except ToolUnavailable:
                raise  # another form would not be answered either
            except ToolInfraError as error:
                refusals.append(f"{form}: {error.reason}")
            else:
                self._form = form
                return found
        raise NoPromptLogprobs(f"{self._url} gives no logprobs of a prompt ({'; '.join(refusals)})")

    async def _ask(self, form: Form, ids: Sequence[int]) -> NDArray[np.float32]:
        if not self._model:
            await self._entry()
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, **FORMS[form]}
        answer = await self._post("v1/completions", body)
        try:
            choice = answer["choices"][0]
            found = _keyed(choice["prompt_logprobs"], ids) if form == "prompt_logprobs" else _echoed(choice, ids)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NoPromptLogprobs(f"{self._url}: {type(error).__name__}: {error}") from error
        if not all(math.isfinite(value) for value in found):
            raise NoPromptLogprobs(f"{self._url}: a logprob is not a finite number")
        return np.maximum(np.array([0.0, *found], dtype=np.float32), LOWEST)

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
        """Whether the server could be asked. Raises `ToolInfraError`, and `BadTeacher` where it has other ids."""
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

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._http.ask("POST", f"{self._url}/{path}", headers=self._headers(), body=dict(body))

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._config.key_variable, "") if self._config.key_variable else ""
        return {"Authorization": f"Bearer {key}"} if key else {}


class Teachers:
    """Those of a run, by data source. Shared by all episodes of a process."""

    def __init__(self, configs: Mapping[str, TeacherConfig]) -> None:
        self._teachers = {pattern: Teacher(config) for pattern, config in configs.items()}

    def of(self, data_source: str) -> Teacher | None:
        """Exact names before patterns, these in their order; None: it has no teacher."""
        return entry_of(self._teachers, data_source)

    async def annotate(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """With `teacher_logprobs` in every segment; unchanged without a teacher, and in evaluations.

        Raises `InfraFailure`.
        """
        teacher = self.of(task.data_source)
        if teacher is None or task.split != "train":
            return trajectory
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
    if len(sampled):
        end = int(sampled[-1]) + 1  # what was observed after the last sampled token needs no judgement
        ids = np.concatenate([segment.prompt_ids, segment.response_ids[:end]]).tolist()
        found = await teacher.logprobs(ids)
        values[sampled] = found[len(segment.prompt_ids) :][sampled]
    return replace(segment, teacher_logprobs=values)


def _keyed(found: Sequence[Any], ids: Sequence[int]) -> list[float]:
    """vLLM's form: a mapping of ids per position, None for the first. Raises `ValueError`, `KeyError`, `TypeError`."""
    if len(found) != len(ids):
        raise ValueError(f"{len(found)} prompt_logprobs for {len(ids)} ids")
    return [float(one[str(token)]["logprob"]) for one, token in zip(found[1:], ids[1:], strict=True)]


def _echoed(choice: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    """OpenAI's form: those of the prompt, then of the token that was sampled, if one was."""
    found = choice["logprobs"]["token_logprobs"]
    if not len(ids) <= len(found) <= len(ids) + 1:
        raise ValueError(f"{len(found)} echoed logprobs for {len(ids)} ids")
    return [float(value) for value in found[1 : len(ids)]]


def _fix_of(error: ToolInfraError) -> str:
    if "HTTP 401" in error.reason or "HTTP 403" in error.reason:
        return "the server refuses the key: set the environment variable that agent.teachers.*.key_variable names"
    return "serve the teacher with vLLM, SGLang or `penstock teacher-server`, which give logprobs of prompts"
