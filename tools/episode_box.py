"""One box for all tools of an episode that work on files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.sandbox import Sandbox, SandboxError, SandboxLost, Session
from penstock.tools.base import BaseTool, ToolInfraError
from penstock.tools.episode_state import shared_in_episode
from penstock.transfer_queue import Task

LIMITS = {
    "wall": "ran longer",
    "cpu": "used more CPU time",
    "memory": "used more memory",
    "output": "wrote more output",
}


def limit_text(what: str, limit: str | None) -> str:
    """Return the text for the model when the sandbox stopped its command or code."""
    if limit not in LIMITS:
        return f"Error: the {what} was stopped."
    return f"Error: the {what} {LIMITS[limit]} than it may and was stopped."


class EpisodeBox:
    """Opened at the first call of any of its tools, closed when the last of them has released it."""

    folder = ""
    """Folder in which relative paths of the editor begin; empty: the session's first one."""
    begin = ""
    """Shell text that the box's first shell runs before its first command."""
    variables: Mapping[str, str] = MappingProxyType({})
    """Variables of programs, in addition to the box's environment."""

    def __init__(self, sandbox: Sandbox, label: str, image: str | None = None) -> None:
        self._sandbox = sandbox
        self._label = label
        self._image = image
        self.python_calls: list[str] = []
        """Code of the calls whose names live in the box's interpreter now, oldest first."""
        self.taken_over = False
        """Another worker's calls made it what it is: `python_calls` does not know them."""
        self._session: Session | None = None
        self._users = 0
        self._opening = asyncio.Lock()

    @property
    def session_id(self) -> str | None:
        """The session's id for the journal: another worker can attach while the box lives."""
        return self._session.session_id if self._session is not None else None

    async def session(self) -> Session:
        """Returns the session of the episode's box, which the first call opens. Raises `SandboxError`."""
        async with self._opening:
            if self._session is None:
                self._session = await self._open()
            return self._session

    @property
    def time_limit_s(self) -> float:
        """The task's own time limit, from the box's opening on; infinite if it has none."""
        return float("inf")

    @property
    def seconds_left(self) -> float:
        """Until the task's own time limit, if it has one."""
        return float("inf")

    @property
    def shared(self) -> bool:
        """More than one tool works in it: what one of them can do again is not all that was done."""
        return self._users > 1

    async def renew(self) -> Session:
        """A fresh box in place of one that is gone. Raises `SandboxError`."""
        async with self._opening:
            lost, self._session = self._session, None
            if lost is not None:
                await lost.close()
            self._session = await self._open()
            return self._session

    async def _open(self) -> Session:
        return await self._sandbox.start(self._label, image=self._image)

    async def adopt(self, session_id: str) -> None:
        """Continue in a box that another worker opened. Raises `SandboxLost`, and `SandboxError`."""
        async with self._opening:
            if self._session is None:
                self._session = await self._sandbox.attach(session_id)
                self.taken_over = True
            elif self._session.session_id != session_id:
                raise SandboxLost(f"the episode is in box {self._session.session_id}, no longer in {session_id}")

    def take(self) -> EpisodeBox:
        self._users += 1
        return self

    async def let_go(self, *, leave: bool = False) -> None:
        """The last one ends the box, or leaves it to another worker. Raises `SandboxError`: its TTL ends it then."""
        self._users -= 1
        if self._users == 0 and self._session is not None:
            session, self._session = self._session, None
            self.python_calls, self.taken_over = [], False
            await (session.leave() if leave else session.close())


def box_for(sandbox: Sandbox, box: EpisodeBox) -> EpisodeBox:
    """The episode's box of this sandbox, taken: `box` if there is none yet, and outside of `sharing`."""
    return shared_in_episode(id(sandbox), box).take()


def image_of(task: Task) -> str | None:
    """The row's own image, from its column ``sandbox_image``; None: the sandbox's default."""
    image = task.extra_info.get("sandbox_image")
    return str(image) if image else None


class BoxTool(BaseTool):
    """A tool in the episode's box. If the box is lost, the episode starts over: several tools wrote its files."""

    replayable = False
    turn_group = "box"
    create_timeout_s = 300.0
    """Longer than a sandbox lets anyone wait for a free box: its refusal names the setting, this deadline cannot."""
    box_kind: type[EpisodeBox] = EpisodeBox
    """Class of the box. Tools of one recipe agree on it: the first one that is called opens the box for all."""

    def __init__(self, sandbox: Sandbox | None = None, **settings: Any) -> None:
        """Raises `ValueError` without a sandbox."""
        super().__init__(sandbox, **settings)
        if sandbox is None:
            raise ValueError(f"tool {self.name} needs a sandbox")
        self._sandbox = sandbox

    def box(self, label: str) -> EpisodeBox:
        """The tool's state, for callers that run no Penstock loop; `release` gives it back."""
        return box_for(self._sandbox, EpisodeBox(self._sandbox, label))

    def _box_of(self, task: Task) -> EpisodeBox:
        """A box for the episode, not opened yet."""
        return EpisodeBox(self._sandbox, task.task_id, image_of(task))

    async def create(self, task: Task) -> EpisodeBox:
        """Opened here: waiting for a free box is not part of a call's time, and no fault of the model's."""
        box = box_for(self._sandbox, self._box_of(task))
        try:
            await box.session()
        except BaseException:
            await box.let_go()
            raise
        return box

    async def attach(self, task: Task, session_id: str) -> EpisodeBox:
        box = box_for(self._sandbox, self._box_of(task))
        try:
            await box.adopt(session_id)
        except BaseException as error:
            # A cancelled caller leaves the box to the next owner, which will attach to it.
            await box.let_go(leave=not isinstance(error, Exception))
            if isinstance(error, SandboxError) and not isinstance(error, SandboxLost):
                raise ToolInfraError("sandbox", str(error)) from error
            raise
        return box

    async def release(self, state: EpisodeBox) -> None:
        await state.let_go()

    async def leave(self, state: EpisodeBox) -> None:
        await state.let_go(leave=True)

    @property
    def run_timeout_s(self) -> float | None:
        """Deadline of one command; None: the sandbox's own limit.

        It is before the tool's own deadline: past that one the whole box would go, with its files.
        """
        return max(1.0, self.guard.config.timeout_s - 2.0) if self.guard else None
