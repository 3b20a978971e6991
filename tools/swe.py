"""The `swe` tools: `shell`, `editor` and `submit` in a box with the task's repository, graded when the episode ends.

A row of the dataset has the fields of `penstock.sandbox.swe.SweTask` as columns. The reward is that of the tools; with
`agent.reward: penstock.tools.swe:tool_reward` an episode that used no tool has one too: 0.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penstock.sandbox import Sandbox, Session
from penstock.sandbox.swe import (
    REFERENCE_RUNS,
    PatchError,
    SweEnvironment,
    SweLimits,
    SweTask,
    SweTaskError,
    grade,
)
from penstock.tools.base import BaseTool, ToolGroup, ToolInfraError, ToolResult
from penstock.tools.editor import EditorTool
from penstock.tools.episode_box import BoxTool, EpisodeBox
from penstock.tools.predictions import DESCRIPTION, keep_prediction
from penstock.tools.shell import ShellTool
from penstock.transfer_queue import Task

SETTING_UP_S = 600.0
"""Waiting for a box, placing the repository, building."""
log = logging.getLogger(__name__)


class SweSettings(SweLimits):
    """`settings` of the recipe's entry ``swe``."""

    reward: Literal["resolved", "share"] = Field(
        "resolved", description="1 where all tests pass, else 0; or the share of FAIL_TO_PASS, 0 where another broke."
    )
    repositories: Path = Field(Path(), description="What rows' relative `repository` and `packages` are relative to.")

    predictions: Path | None = Field(None, description=DESCRIPTION)

    @property
    def limits(self) -> SweLimits:
        given = {name: getattr(self, name) for name in SweLimits.model_fields}
        return SweLimits(**given | ({"after_a_hang": True} if self.reward == "share" else {}))


class SweTools(ToolGroup):
    """One entry of a recipe, three tools, one box."""

    def __init__(self, sandbox: Sandbox | None = None, **settings: Any) -> None:
        self._sandbox = sandbox
        self._settings = SweSettings(**settings)

    def tools(self) -> list[BaseTool]:
        return [kind(self._sandbox, self._settings) for kind in (SweShell, SweEditor, SubmitTool)]


class SweBox(EpisodeBox):
    """The episode's box with the repository placed in it; its first shell begins there."""

    def __init__(self, sandbox: Sandbox, task: SweTask, label: str, settings: SweSettings) -> None:
        super().__init__(sandbox, label)
        self._task = task
        self._settings = settings
        self._environment: SweEnvironment | None = None
        self._graded = False

    async def _open(self) -> Session:
        environment = await SweEnvironment.open(self._sandbox, self._task, self._settings.limits, self._label)
        self._settle(environment)
        return environment.session

    async def adopt(self, session_id: str) -> None:
        await super().adopt(session_id)
        if self._environment is None:
            self._settle(await SweEnvironment.around(await self.session(), self._task, self._settings.limits))

    def _settle(self, environment: SweEnvironment) -> None:
        self._environment, self.folder = environment, environment.folder
        self.variables = environment.variables
        exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.variables.items()]
        self.begin = "; ".join([*exports, f"cd -- {shlex.quote(environment.folder)}"])

    async def reward(self) -> float | None:
        """Of what is in the repository now; once per box, None when asked again.

        The box is closed before another one is asked for: episodes that each hold one and wait for a second would
        wait for each other.
        """
        if self._graded or self._environment is None:
            return None
        self._graded = True
        patch = await self._patch(self._environment)
        await self._environment.close()
        if self._settings.predictions is not None:
            await asyncio.to_thread(
                keep_prediction, self._settings.predictions, self._label, self._task.instance_id, patch
            )
        if not patch.strip():
            return 0.0
        found = await grade(self._sandbox, self._task, patch, self._settings.limits, f"{self._label} grading")
        log.info(
            "%s: %s resolved=%s share=%.2f %s",
            self._label,
            self._task.instance_id,
            found.resolved,
            found.share,
            found.reason,
        )
        return found.share if self._settings.reward == "share" else float(found.resolved)

    async def _patch(self, environment: SweEnvironment) -> bytes:
        try:
            return await environment.diff()
        except PatchError as error:
            log.info("%s: no patch: %s", self._label, error)
            return b""


class _SweTool(BoxTool):
    """What the three have in common: the box, opened before the first call, and its reward."""

    box_kind = SweBox

    def __init__(self, sandbox: Sandbox | None, settings: SweSettings) -> None:
        super().__init__(sandbox)
        self._swe = settings
        self.create_timeout_s = SETTING_UP_S
        runs = 1 + 2 * settings.decoys + REFERENCE_RUNS  # each plan may have to be proven first
        self.reward_timeout_s = runs * settings.tests_timeout_s + SETTING_UP_S

    def _box_of(self, task: Task) -> SweBox:
        try:
            row = SweTask.from_row(task.extra_info, self._swe.repositories)
        except SweTaskError as error:
            raise ToolInfraError("swe", str(error)) from error
        return SweBox(self._sandbox, row, task.task_id, self._swe)

    async def create(self, task: Task) -> EpisodeBox:
        try:
            return await super().create(task)
        except SweTaskError as error:
            raise ToolInfraError("swe", str(error)) from error

    async def attach(self, task: Task, session_id: str) -> EpisodeBox:
        try:
            return await super().attach(task, session_id)
        except SweTaskError as error:
            raise ToolInfraError("swe", str(error)) from error

    async def calc_reward(self, state: Any) -> float | None:
        try:
            reward: float | None = await state.reward()
        except SweTaskError as error:
            raise ToolInfraError("swe", str(error)) from error
        return reward


class SweShell(_SweTool, ShellTool):
    """`shell`, beginning in the repository."""


class SweEditor(_SweTool, EditorTool):
    """`editor`, its paths relative to the repository."""


class SubmitTool(_SweTool):
    """Ends the episode; what counts is what is in the repository."""

    name = "submit"
    description = "Hand in your changes to the repository; nothing comes after it."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult("submitted", final=True)


def tool_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """`agent.reward` where the tools' own rewards are it, and an episode without a call earns nothing."""
    return float(sum(extra_info["tool_rewards"].values()))
