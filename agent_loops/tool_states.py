"""States of an episode's tools: created at first use, attached to after a crash, always released.

first use                 attach to the session in the journal ──lost──► create ──► replay earlier calls, or restart
end of the episode        release, including sessions that an earlier worker opened and this one never used
drain, lease lost         leave: the next owner attaches to the same sessions
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from penstock.agent_loops.errors import EpisodeRestart, InfraFailure
from penstock.agent_loops.journal import EpisodeJournal
from penstock.common import USERS_FAULTS, describe_error
from penstock.sandbox import SandboxError, SandboxLost, as_call
from penstock.tools import BaseTool, ToolInfraError, sharing
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import Task

RELEASE_DEADLINE_S = 10.0
OnLost = Literal["replay", "restart"]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A tool call with its idempotency key."""

    call: ToolCall
    name: str


Execute = Callable[[NamedCall, Any], Awaitable[object]]


@dataclass(slots=True)
class ToolState:
    """A tool's state in this episode."""

    lock: asyncio.Lock
    """Calls on one state run in the order in which the model wrote them."""
    state: Any = None
    ready: bool = False


@dataclass(slots=True)
class ToolStates:
    """States of one attempt at an episode; `give_back` must be awaited at its end."""

    tools: Mapping[str, BaseTool]
    task: Task
    journal: EpisodeJournal
    on_lost: OnLost
    execute: Execute
    past: list[NamedCall] = field(default_factory=list)
    """Finished calls, replayed ones too, those of the current turn among them: what a fresh state must have seen."""
    open_states: dict[str, ToolState] = field(default_factory=dict)
    _groups: dict[str, asyncio.Lock] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Any]:
        """Locks and yields the tool's state; for a stateless tool yields None, unlocked.

        Raises `InfraFailure`, and `EpisodeRestart` if the state is lost and may not be recreated.
        """
        if name not in self.open_states:
            group = self.tools[name].turn_group
            self.open_states[name] = ToolState(
                self._groups.setdefault(group, asyncio.Lock()) if group else asyncio.Lock()
            )
        entry = self.open_states[name]
        async with entry.lock:
            if not entry.ready:
                try:
                    await self._make_ready(name, entry)
                except SandboxLost as error:
                    raise InfraFailure("sandbox", str(error)) from error
            if entry.state is not None:
                yield entry.state
                return
        yield None

    async def lose(self, name: str, state: Any) -> None:
        """Drops `state`, whose session is gone; the next use of the tool creates a fresh one."""
        if name not in self.open_states or self.open_states[name].state is not state:
            return
        for one in self._partners(name):
            self.journal.sessions.pop(one, None)
            entry = self.open_states.pop(one, None)
            if entry is not None and entry.ready:
                await self._give_back_one(one, entry.state, leave=False)

    def sessions(self) -> dict[str, str]:
        """Tool → session that is open now, for the journal."""
        named = {name: getattr(entry.state, "session_id", None) for name, entry in self.open_states.items()}
        return {name: session for name, session in named.items() if session is not None}

    def can_repeat(self, name: str) -> bool:
        """Returns True if calls of this tool restore its state when they run again in a fresh one, as in a branch."""
        entry = self.open_states.get(name)
        if entry is None or entry.state is None:
            return True
        return self.on_lost == "replay" and self.tools[name].replayable

    async def with_rewards(self) -> dict[str, Any]:
        """States of the tools that have a `calc_reward` and were used, in this worker or in one before."""
        used = {named.call.name for named in self.past} | {
            name for name, entry in self.open_states.items() if entry.ready
        }
        states = {}
        for name in (name for name in self.tools if name in used):
            calc_reward = self.tools[name].calc_reward
            if getattr(calc_reward, "__func__", calc_reward) is not BaseTool.calc_reward:
                async with self.using(name) as state:
                    states[name] = state
        return states

    async def give_back(self, *, leave: bool) -> None:
        """Never raises: what cannot be given back is logged and left to its TTL.

        `leave`: the episode continues in another worker; sessions that outlive this process stay open for it.
        """
        known, ready = self.sessions(), {name: entry.state for name, entry in self.open_states.items() if entry.ready}
        self.open_states = {}
        await asyncio.gather(*(self._give_back_one(name, state, leave) for name, state in ready.items()))
        if not leave:
            # Sessions that an earlier worker left and that this attempt did not use.
            unclaimed = {session: name for name, session in self.journal.sessions.items()}
            for session, name in unclaimed.items():
                if session not in known.values() and name in self.tools:
                    await self._end_session(name, session)

    # making ready --------------------------------------------------------------------------------------------------
    async def _make_ready(self, name: str, entry: ToolState) -> None:
        """Creates the state; on a resumed episode attaches to the old session, or replays past calls on a fresh one."""
        shared = any(self.open_states[one].ready for one in self._partners(name) if one in self.open_states)
        with sharing(self._shared):
            attached = await self._attach(name)
            entry.state = await self._create(name) if attached is None else attached
        entry.ready = True
        if attached is not None or entry.state is None or shared:
            return
        past = [named for named in self.past if named.call.name in self._partners(name)]
        replayable = all(self.tools[named.call.name].replayable for named in past)
        if past and (self.on_lost == "restart" or not replayable):
            raise EpisodeRestart(f"the state of tool {name} was lost with its worker")
        for named in past:
            await self.execute(named, entry.state)

    async def _create(self, name: str) -> Any:
        with as_call(f"{await self.journal.life()}/state of {name}"):
            return await within(name, self.tools[name].create_timeout_s, self.tools[name].create(self.task))

    def _partners(self, name: str) -> list[str]:
        """The tools that share its state: its turn group, including itself."""
        group = self.tools[name].turn_group
        return [one for one, tool in self.tools.items() if one == name or (group and tool.turn_group == group)]

    async def _attach(self, name: str) -> Any:
        sessions = self.journal.sessions
        session_id = next((sessions[one] for one in self._partners(name) if one in sessions), None)
        if session_id is None:
            return None
        try:
            return await within(name, 60.0, self.tools[name].attach(self.task, session_id))
        except SandboxLost:
            return None

    # giving back ---------------------------------------------------------------------------------------------------
    async def _give_back_one(self, name: str, state: Any, leave: bool) -> None:
        tool = self.tools[name]
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await (tool.leave(state) if leave else tool.release(state))
        except USERS_FAULTS:
            log.exception("tool %s could not be released in episode of %s", name, self.task.task_id)

    async def _end_session(self, name: str, session: str) -> None:
        tool = self.tools[name]
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                with sharing({}):
                    state = await tool.attach(self.task, session)
                if state is not None:
                    await tool.release(state)
        except SandboxLost:
            return  # already ended
        except USERS_FAULTS:
            log.exception("session %s of tool %s could not be ended; it expires by itself", session, name)


async def as_infra(name: str, work: Awaitable[T]) -> T:
    """`work` of the tool `name`. Raises `InfraFailure`; `SandboxLost` and `TimeoutError` as they are."""
    try:
        return await work
    except (SandboxLost, TimeoutError):
        raise
    except ToolInfraError as error:
        raise InfraFailure(error.component, error.reason) from error
    except SandboxError as error:
        raise InfraFailure("sandbox", str(error)) from error
    except USERS_FAULTS as error:
        raise InfraFailure(f"tool {name}", describe_error(error)) from error


async def within(name: str, deadline_s: float, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Raises `InfraFailure` after the deadline, and `SandboxLost`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await as_infra(name, work)
    except TimeoutError as error:
        raise InfraFailure(f"tool {name}", f"not ready within {deadline_s:g} s") from error
