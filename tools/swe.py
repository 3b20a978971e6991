"""The `swe` tools: `shell`, `editor` and `submit` in a box with the task's repository, graded when the episode ends.

A row of the dataset has the fields of `penstock.sandbox.swe.SweTask` as columns. The reward is that of the tools; with
`agent.reward: penstock.tools.swe:tool_reward` an episode that used no tool has one too: 0.
"""

from __future__ import annotations

import asyncio
import logging
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
from penstock.tools.base import BaseTool, ToolGroup
from penstock.tools.editor import EditorTool
from penstock.tools.graded_box import PREDICTIONS, GradedBox, GradedTool, Submit, keep_prediction
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

    predictions: Path | None = Field(None, description=PREDICTIONS)

    @property
    def limits(self) -> SweLimits:
        values = {name: getattr(self, name) for name in SweLimits.model_fields}
        return SweLimits(**values | ({"after_a_hang": True} if self.reward == "share" else {}))


class SweTools(ToolGroup):
    """One entry of a recipe, three tools, one box."""

    def __init__(self, sandbox: Sandbox | None = None, **settings: Any) -> None:
        self._sandbox = sandbox
        self._settings = SweSettings(**settings)

    def tools(self) -> list[BaseTool]:
        return [kind(self._sandbox, self._settings) for kind in (SweShell, SweEditor, SweSubmit)]


class SweBox(GradedBox[SweEnvironment]):
    """The episode's box with the repository placed in it."""

    def __init__(self, sandbox: Sandbox, task: SweTask, label: str, settings: SweSettings) -> None:
        super().__init__(sandbox, label)
        self._task = task
        self._settings = settings

    async def _set_up(self) -> SweEnvironment:
        return await SweEnvironment.open(self._sandbox, self._task, self._settings.limits, self._label)

    async def _find(self, session: Session) -> SweEnvironment:
        return await SweEnvironment.around(session, self._task, self._settings.limits)

    async def _grade(self, environment: SweEnvironment) -> float:
        """Grades the repository's changes in another box.

        This one is closed before another one is asked for: episodes that each hold one and wait for a second would
        wait for each other.
        """
        name, predictions = self._task.instance_id, self._settings.predictions
        try:
            patch = await environment.diff()
        except PatchError as error:
            log.info("%s: no patch: %s", self._label, error)
            patch = b""
        await environment.close()
        if predictions is not None:
            await asyncio.to_thread(keep_prediction, predictions, self._label, name, patch)
        if not patch.strip():
            return 0.0
        result = await grade(self._sandbox, self._task, patch, self._settings.limits, f"{self._label} grading")
        outcome = (name, result.resolved, result.share, result.reason)
        log.info("%s: %s resolved=%s share=%.2f %s", self._label, *outcome)
        return result.share if self._settings.reward == "share" else float(result.resolved)


class _SweTool(GradedTool):
    box_kind = SweBox
    component = "swe"
    task_error = SweTaskError

    def __init__(self, sandbox: Sandbox | None, settings: SweSettings) -> None:
        super().__init__(sandbox)
        self._swe = settings
        self.create_timeout_s = SETTING_UP_S
        rounds = 1 + settings.decoys  # a limit may be reached in each, then the reference patch and the round run again
        runs = 3 * rounds + 2 * settings.decoys + REFERENCE_RUNS  # each plan may have to be proven first
        self.reward_timeout_s = runs * settings.tests_timeout_s + SETTING_UP_S

    def _box_of(self, task: Task) -> SweBox:
        row = SweTask.from_row(task.extra_info, self._swe.repositories)
        return SweBox(self._sandbox, row, task.task_id, self._swe)


class SweShell(_SweTool, ShellTool):
    """`shell`, beginning in the repository."""


class SweEditor(_SweTool, EditorTool):
    """`editor`, its paths relative to the repository."""


class SweSubmit(_SweTool, Submit):
    description = "Hand in your changes to the repository; nothing comes after it."


def tool_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """`agent.reward` where the tools' own rewards are it, and an episode without a call earns nothing.

    Raises `ValueError` for a recorded episode: its client has tools of its own, and nothing here grades it.
    """
    if "tool_rewards" not in extra_info:
        raise ValueError("a recorded episode has no tools here that grade it: its client posts the reward")
    return float(sum(extra_info["tool_rewards"].values()))
