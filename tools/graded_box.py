"""Common parts of `swe` and `harbor`: three tools of one box, which holds a task and is graded at the end."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import xxhash

from penstock.common import write_atomically
from penstock.sandbox import Sandbox, Session
from penstock.tools.base import ToolInfraError, ToolResult
from penstock.tools.episode_box import BoxTool, EpisodeBox
from penstock.transfer_queue import Task

PREDICTIONS = "Folder for each graded episode's patch, which `penstock data export` writes as SWE-bench's predictions."


class Environment(Protocol):
    """A task that is set up in a box."""

    @property
    def session(self) -> Session: ...
    @property
    def folder(self) -> str: ...
    @property
    def variables(self) -> Mapping[str, str]: ...


E = TypeVar("E", bound=Environment)


class GradedBox(EpisodeBox, Generic[E]):
    """The episode's box with the task set up in it; its first shell begins in the task's folder."""

    def __init__(self, sandbox: Sandbox, label: str) -> None:
        super().__init__(sandbox, label)
        self._environment: E | None = None
        self._graded = False

    @abstractmethod
    async def _set_up(self) -> E:
        """Opens a box and sets the task up in it."""

    @abstractmethod
    async def _find(self, session: Session) -> E:
        """Returns the environment that another worker set up in `session`."""

    @abstractmethod
    async def _grade(self, environment: E) -> float:
        """Returns the reward of what is in the box now."""

    async def _open(self) -> Session:
        environment = await self._set_up()
        self._settle(environment)
        return environment.session

    async def adopt(self, session_id: str) -> None:
        await super().adopt(session_id)
        if self._environment is None:
            self._settle(await self._find(await self.session()))

    def _settle(self, environment: E) -> None:
        self._environment, self.folder = environment, environment.folder
        self.variables = environment.variables
        exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.variables.items()]
        self.begin = "; ".join([*exports, f"cd -- {shlex.quote(environment.folder)}"])

    async def reward(self) -> float | None:
        """Grades the box once; returns None when it is asked again."""
        if self._graded or self._environment is None:
            return None
        self._graded = True
        return await self._grade(self._environment)


class GradedTool(BoxTool):
    """Base of the three tools: the box is opened before the first call, its reward is the tool's."""

    component: ClassVar[str]
    """Named in failures."""
    task_error: ClassVar[type[Exception]]
    """Raised where a task cannot be set up or graded: a failure of the infrastructure."""

    async def create(self, task: Task) -> EpisodeBox:
        with self._as_failure():
            return await super().create(task)

    async def attach(self, task: Task, session_id: str) -> EpisodeBox:
        with self._as_failure():
            return await super().attach(task, session_id)

    async def calc_reward(self, state: Any) -> float | None:
        with self._as_failure():
            reward: float | None = await state.reward()
        return reward

    @contextlib.contextmanager
    def _as_failure(self) -> Iterator[None]:
        try:
            yield
        except self.task_error as error:
            raise ToolInfraError(self.component, str(error)) from error


class Submit(GradedTool):
    """Ends the episode; what counts is what is in the box."""

    name = "submit"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult("submitted", final=True)


def keep_prediction(folder: Path, episode: str, instance_id: str, patch: bytes) -> None:
    """A file per episode: one that is graded again replaces it. Raises `ToolInfraError` if it cannot be written."""
    name = re.sub(r"[^A-Za-z0-9_.#-]", ".", episode).lstrip(".") or "episode"
    name += f"-{xxhash.xxh3_64_hexdigest(episode.encode())[:8]}"  # a/b and a.b are two episodes
    line = {"instance_id": instance_id, "model_patch": patch.decode("utf-8", "replace"), "episode": episode}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.json", json.dumps(line) + "\n")
    except OSError as error:
        raise ToolInfraError("predictions", f"{folder}: {error}") from error
