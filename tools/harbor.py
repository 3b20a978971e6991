"""The `harbor` tools: `shell`, `editor` and `submit` in the box of a Harbor task, graded by its tests at the end.

A row of the dataset (`data.train: harbor:FOLDER`) names the task's folder. The loop `command` runs its program in the
same box. The reward is that of the task's own tests, in the box that the agent worked in.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.sandbox import Sandbox, Session
from penstock.sandbox.harbor import HarborEnvironment, HarborTask, HarborTaskError, read_task
from penstock.tools.base import BaseTool, NoToolReward, ToolGroup, ToolInfraError, ToolResult
from penstock.tools.editor import EditorTool
from penstock.tools.episode_box import EpisodeBox
from penstock.tools.graded_box import PREDICTIONS, GradedBox, GradedTool, Submit, keep_prediction
from penstock.tools.shell import ShellTool
from penstock.transfer_queue import Task

FOLDER = "harbor_task"
"""The column that names a task's folder."""
SETTING_UP_S = 900.0
"""Waiting for a box, its entry point, its health check."""
log = logging.getLogger(__name__)


class HarborSettings(BaseModel):
    """`settings` of the recipe's entry ``harbor``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: Path = Field(Path(), description="What rows' relative folders are relative to.")
    no_reward: Literal["auto", "infra_error", "zero"] = Field(
        "auto",
        description="Tests that write no reward: the agent's own 0, since its code ran in their box; or tried again as"
        " a failure, as Harbor counts it, which an agent can bring about. auto: a failure until the run has had"
        " a reward of the data source, since tasks or `reward_key` may be wrong; then 0.",
    )
    reward_key: str = Field("", description="Which one of several rewards in reward.json; empty: `reward`.")
    pass_env: list[str] = Field(
        default_factory=list, description="Variables of the worker that tasks may read as ${NAME}; no others."
    )
    predictions: Path | None = Field(None, description=PREDICTIONS)
    longest_tests_s: float = Field(3600.0, gt=0, description="Most that a task's verifier.timeout_sec may be.")


class HarborTools(ToolGroup):
    """One entry of a recipe, three tools, one box."""

    def __init__(self, sandbox: Sandbox | None = None, **settings: Any) -> None:
        self._sandbox = sandbox
        self._settings = HarborSettings(**settings)

    def tools(self) -> list[BaseTool]:
        return [kind(self._sandbox, self._settings) for kind in (HarborShell, HarborEditor, HarborSubmit)]


class HarborBox(GradedBox[HarborEnvironment]):
    """The episode's box with the task set up in it."""

    def __init__(self, sandbox: Sandbox, task: HarborTask, label: str, settings: HarborSettings) -> None:
        super().__init__(sandbox, label)
        self._task = task
        self._settings = settings
        self._passed = {name: os.environ[name] for name in settings.pass_env if name in os.environ}
        self._opened_at = 0.0

    @property
    def time_limit_s(self) -> float:
        limit = self._task.agent_timeout_s
        return float("inf") if limit is None else limit

    @property
    def seconds_left(self) -> float:
        """Return the seconds left of the task's agent.timeout_sec, from the box's opening on; another worker begins
        anew.
        """
        return self._opened_at + self.time_limit_s - time.monotonic()

    async def _set_up(self) -> HarborEnvironment:
        return await HarborEnvironment.open(self._sandbox, self._task, self._label, self._passed)

    async def _find(self, session: Session) -> HarborEnvironment:
        return await HarborEnvironment.around(session, self._task, self._passed)

    def _settle(self, environment: HarborEnvironment) -> None:
        super()._settle(environment)
        self._opened_at = time.monotonic()

    async def _grade(self, environment: HarborEnvironment) -> float:
        """Raises `NoToolReward` where the tests write none, `ToolInfraError` if `no_reward` calls that a failure."""
        predictions, name, key = self._settings.predictions, self._task.name, self._settings.reward_key
        if predictions is not None:  # before the tests come
            patch = await environment.patch()
            if patch is None:
                log.info("%s: %s: its working directory is not a git repository: no patch", self._label, name)
            else:
                await asyncio.to_thread(keep_prediction, predictions, self._label, name, patch)
        grade = await environment.grade()
        value = grade.rewards.get(key) if key else grade.reward
        log.info("%s: %s reward=%s %s", self._label, name, value, json.dumps(dict(grade.rewards)))
        if value is not None:
            return value
        wrong_key = f"no reward is called {key!r}: it has {', '.join(grade.rewards)}" if key and grade.rewards else ""
        cause = f"task {name}: {wrong_key or grade.why_none()}"
        if self._settings.no_reward == "infra_error":
            raise ToolInfraError("harbor", cause)
        # An operator's `zero` stands for tests that write nothing, not for a reward of another name.
        raise NoToolReward("harbor", cause, is_zero=self._settings.no_reward == "zero" and bool(grade.cause))


class _HarborTool(GradedTool):
    box_kind = HarborBox
    component = "harbor"
    task_error = HarborTaskError

    def __init__(self, sandbox: Sandbox | None, settings: HarborSettings) -> None:
        super().__init__(sandbox)
        self._harbor = settings
        self.create_timeout_s = SETTING_UP_S
        self.reward_timeout_s = settings.longest_tests_s + SETTING_UP_S

    def _box_of(self, task: Task) -> HarborBox:
        folder = task.extra_info.get(FOLDER)
        if not folder:
            raise ToolInfraError("harbor", f"the row has no {FOLDER}: it is none of data.train: harbor:FOLDER")
        harbor = read_task_once((self._harbor.tasks / str(folder)).absolute())
        if harbor.verifier_timeout_s > self._harbor.longest_tests_s:
            raise ToolInfraError(
                "harbor",
                f"task {harbor.name}: verifier.timeout_sec {harbor.verifier_timeout_s:g} is more than the setting"
                f" longest_tests_s {self._harbor.longest_tests_s:g}",
            )
        return HarborBox(self._sandbox, harbor, task.task_id, self._harbor)


class HarborShell(_HarborTool, ShellTool):
    """`shell`, beginning in the working directory, until the task's time is up."""

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        if isinstance(state, HarborBox) and state.seconds_left <= 0:
            return ToolResult("The time for this task is up.", final=True)
        return await super().execute(state, arguments)


class HarborEditor(_HarborTool, EditorTool):
    """`editor`, its paths relative to the working directory."""


class HarborSubmit(_HarborTool, Submit):
    description = "Hand in your work; nothing comes after it."


@functools.lru_cache(maxsize=4096)
def read_task_once(folder: Path) -> HarborTask:
    """Reads a task once per process: its image is named by its files. Raises `HarborTaskError`."""
    return read_task(folder)
