"""Episodes on an environment of others: its observations are what the user says, the model's answers its actions.

    reset(seed of the row) ─► observation ─► answer ─► action ─► step ─► observation, reward ─► answer …

Per turn the trajectory has the reward of its step (`turn_rewards`) and the state it was taken in (`extra.turn_states`,
which GiGPO and HGPO compare). On a resumed episode the environment is reset with the same seed and stepped with the
recorded answers; if its answers then differ, the episode starts afresh.
"""

from __future__ import annotations

import asyncio
import math
import re
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import xxhash

from penstock.agent_loops.base import AgentLoopBase, WorkerServices
from penstock.agent_loops.environments.protocol import COMPONENT, Environment, EnvStep, InvalidAction, StepFailed
from penstock.agent_loops.environments.settings import EnvironmentSettings, options_of, seed_of
from penstock.agent_loops.environments.talk import Talk, WholeTalk, WindowedTalk
from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.loops.react import read_settings, with_system
from penstock.agent_loops.segment import TRUNCATED_DEADLINE, TRUNCATED_TURNS, AgentLoopOutput
from penstock.agent_loops.tracing import span
from penstock.rollout_server import Generation
from penstock.transfer_queue import COMPLETED, Lease, Outcome, OutcomeKind, Task

TRIMMED = " \t\n\r\"'`.,:;!*[]()"
"""Around an action's name."""
SHARE_OF_DEADLINE = 0.9
"""Share of the episode's deadline that the loop uses: past the deadline the turns' rewards are lost."""


@dataclass(slots=True)
class PlayedTurns:
    """Rewards, states and counts of the turns so far."""

    rewards: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """Before each turn."""
    steps: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    """``all`` turns without an action that exists, and those ``in a row``."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of the newest step's info."""

    def add_invalid(self, reward: float) -> None:
        self.rewards.append(reward)
        self.invalid.update({"all": 1, "in a row": 1})

    def add_step(self, step: EnvStep) -> None:
        self.rewards.append(step.reward)
        self.steps += 1
        self.invalid["in a row"] = 0
        self.numbers.update(step.numbers)


class EnvironmentLoop(AgentLoopBase):
    """Base of loops on environments: write `open`."""

    settings_kind: ClassVar[type[EnvironmentSettings]] = EnvironmentSettings
    takes_tools: ClassVar[bool] = False
    settings: Any
    _environment: Environment | None = None

    def equip(self, services: WorkerServices, lease: Lease, journal: EpisodeJournal) -> None:
        super().equip(services, lease, journal)
        self._services, self._lease = services, lease

    @abstractmethod
    async def open(self, task: Task, options: dict[str, Any]) -> Environment:
        """A fresh environment for this episode alone. Raises `InfraFailure`."""

    async def setup(self, task: Task) -> None:
        self.settings = read_settings(self.settings_kind, self)
        try:
            self._pattern = re.compile(self.settings.action_pattern)
        except re.error as error:
            raise InfraFailure("loop", f"agent.settings.action_pattern is not a valid pattern: {error}") from error
        self._names = {name.strip(TRIMMED).casefold(): name for name in self.settings.actions}
        self._turns = PlayedTurns()

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        deadline_s = self._services.config.episode_deadline_s
        limit_s = min(self.settings.max_seconds or math.inf, deadline_s * SHARE_OF_DEADLINE)
        outcome: Outcome | None
        try:
            async with asyncio.timeout(limit_s) as deadline:
                first = await self._begin(task)
                messages = with_system(task.messages, self.settings.system)
                text, remembered = self._observation_text(first), self.settings.remembered_turns
                talk: Talk = (
                    WholeTalk(self, messages, text)
                    if remembered is None
                    else WindowedTalk(self, messages, text, remembered)
                )
                if talk.done:
                    raise InfraFailure("loop", "task and first observation leave no room for an answer")
                outcome = await self._play(talk, first)
        except TimeoutError:
            if not deadline.expired():
                raise
            turns = self._turns
            if not turns.states:
                reason = f"reset and first answer took longer than {limit_s:g} s"
                raise InfraFailure(COMPONENT, reason) from None
            # The turn in progress, if it has an answer, earned nothing yet.
            turns.rewards += [0.0] * (len(turns.states) - len(turns.rewards))
            outcome = TRUNCATED_DEADLINE
        return self._finished(talk, outcome)

    async def _begin(self, task: Task) -> EnvStep:
        seed = seed_of(task)
        self._environment = await self.open(task, options_of(task, self.settings))
        with span("tool", "reset"):
            first = await self._environment.reset(seed)
        if first.done:
            raise InfraFailure(COMPONENT, f"it ends with its reset, seed {seed}")
        return first

    async def teardown(self) -> None:
        if self._environment is not None:
            await self._environment.close()

    # turns ---------------------------------------------------------------------------------------------------------
    async def _play(self, talk: Talk, now: EnvStep) -> Outcome | None:
        """To the episode's end; None: the model's budget is used up."""
        while not talk.done:
            reply = await self.llm.generate(talk.segment)
            self._turns.states.append(f"{xxhash.xxh3_64_intdigest(now.state.encode()):016x}")
            if talk.segment.finish_reason == "length":
                self._turns.rewards.append(0.0)  # cut: what it would have done is not known
                return None
            action, text = self._action(reply)
            try:
                with span("tool", "step"):
                    now = await self._step(action)
            except InvalidAction as error:
                self._turns.add_invalid(self.settings.invalid_reward)
                if self._turns.invalid["in a row"] == self.settings.max_invalid_turns:
                    return Outcome(
                        OutcomeKind.POLICY_ERROR, f"{self.settings.max_invalid_turns} turns in a row without an action"
                    )
                talk.observe(reply, text, str(error))
            except StepFailed as error:
                raise InfraFailure(COMPONENT, f"step {self._turns.steps + 1} raised {error}") from error
            else:
                self._turns.add_step(now)
                if not math.isfinite(now.reward):
                    raise InfraFailure(COMPONENT, f"step {self._turns.steps} gave the reward {now.reward}")
                if (outcome := self._end_of(now)) is not None:
                    return outcome
                talk.observe(reply, text, self._observation_text(now))
        return None

    def _action(self, reply: Generation) -> tuple[str | None, str]:
        """The action (None: there is none), and the answer's words without thoughts."""
        answer = self.chat.decode(reply.token_ids, special=False).rpartition("</think>")[2].strip()[:4000]
        action: str | None = answer
        if self.settings.action_pattern:
            matches = list(self._pattern.finditer(answer))
            action = matches[-1][1 if self._pattern.groups else 0] if matches else None
        if self._names and action is not None:
            action = self._names.get(action.strip(TRIMMED).casefold())
        return action, answer

    async def _step(self, action: str | None) -> EnvStep:
        if action is None:
            known = f" The actions are: {', '.join(self.settings.actions)}." if self.settings.actions else ""
            raise InvalidAction(f"Your answer names no action.{known}")
        assert self._environment is not None
        return await self._environment.step(action)

    def _end_of(self, step: EnvStep) -> Outcome | None:
        if step.terminated:
            return COMPLETED
        return TRUNCATED_TURNS if step.truncated else None

    def _observation_text(self, step: EnvStep) -> str:
        """Templates refuse messages of nothing."""
        entries = [f"{name}: {_written(step.shown.get(name))}" for name in self.settings.show]
        return "\n".join([step.text, *entries]).strip("\n") or "(nothing)"

    # the end -------------------------------------------------------------------------------------------------------
    def _finished(self, talk: Talk, outcome: Outcome | None) -> list[AgentLoopOutput]:
        turns = self._turns
        outputs = talk.outputs(outcome, turns.rewards)
        total = float(sum(turns.rewards))
        reward = {"sum": total, "last": float(turns.rewards[-1]), "none": None}[self.settings.reward]
        metrics = {
            **{f"env/{name}": value for name, value in turns.numbers.items()},
            "env/steps": float(turns.steps),
            "env/invalid_turns": float(turns.invalid["all"]),
            "env/return": total,
            "env/ended": float(outcome == COMPLETED),
        }
        last = replace(outputs[-1], reward=reward, metrics=metrics, extra={"turn_states": list(turns.states)})
        return [*outputs[:-1], last]


def _written(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


async def within(seconds: float, what: str, setting: str, call: Any) -> Any:
    """Awaits `call`. Raises `InfraFailure` naming the deadline."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfraFailure(COMPONENT, f"{what} took longer than {seconds:g} s (agent.settings.{setting})") from error
