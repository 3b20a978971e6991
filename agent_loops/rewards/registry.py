"""The run's reward: rewards by name, by verl's `data_source` names, and the one that `agent.reward` names.

`RewardFunction` applies the deadline and turns every exception into a failure: an error is never a low score. A score
is kept in the episode's journal before the episode is completed: after a crash in between no judge is asked again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.agent_loops.config import BY_SOURCE, AgentConfig, RewardChoice, entry_of
from penstock.agent_loops.errors import InfraFailure, LoadError, NoReward
from penstock.agent_loops.journal import RecordedScore
from penstock.agent_loops.loader import load_object, nearest
from penstock.agent_loops.rewards.base import PARAMETERS, Answer, BaseReward, FunctionReward, Value
from penstock.agent_loops.token_row import little_endian
from penstock.common import USERS_FAULTS, describe_error
from penstock.common.errors import defined_at, finite_number
from penstock.common.registry import near_and_known
from penstock.sandbox import BoxNeeds, Sandbox, SandboxError, Session
from penstock.tools import ToolInfraError
from penstock.transfer_queue import Segment, Task

PACKAGE = "penstock.agent_loops.rewards"
REWARDS = {
    "gsm8k": f"{PACKAGE}.gsm8k:compute_score",
    "maths": f"{PACKAGE}.maths:Maths",
    "code": f"{PACKAGE}.programs:Programs",
    "search_em": f"{PACKAGE}.search_qa:exact_match",
    "search_f1": f"{PACKAGE}.search_qa:f1",
    "reward_server": f"{PACKAGE}.reward_server:RewardServer",
    "judge": f"{PACKAGE}.judge:Judge",
    "program_file": f"{PACKAGE}.program_file:compute_score",
    "reasoning_gym": f"{PACKAGE}.reasoning_gym:ReasoningGym",
}
"""Name → path, imported when it is used. The functions among them are rules: their scores are not journaled."""
DATA_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "maths",
    "DigitalLearningGmbH/MATH-lighteval": "maths",
    "HuggingFaceH4/MATH-500": "maths",
    "math": "maths",
    "math_dapo*": "maths",
    "aime*": "maths",
    "numina_*": "maths",
    "hiyouga/geometry3k": "maths",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "search_em",
    "reasoning_gym/*": "reasoning_gym",
}
"""verl's names, and patterns of them → name of a reward."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``reward/NAME`` for each further number it returned."""


class ScoreKeeper(Protocol):
    """An episode's journal."""

    @property
    def score(self) -> RecordedScore | None: ...

    async def keep_score(self, score: RecordedScore) -> None:
        """Raises `QueueError`."""

    async def prove(self, reward: str) -> None:
        """Records for the whole run that a reward of this name came. Raises `QueueError`."""

    async def is_proven(self, reward: str) -> bool:
        """Raises `QueueError`."""


class RewardFunction:
    """Calls a `BaseReward`, or a function in verl's ``compute_score`` shape: sync or async, number or dict."""

    def __init__(
        self,
        reward: BaseReward | Callable[..., Any],
        name: str = "compute_score",
        timeout_s: float = 60.0,
        settings: str = "",
    ) -> None:
        """`settings` distinguishes rewards of one name. Raises `LoadError` where a function lacks verl's arguments."""
        self._reward = reward if isinstance(reward, BaseReward) else FunctionReward(reward, name)
        self._name = name
        self._timeout_s = timeout_s
        self._settings = settings
        self._proven: set[str] = set()
        """Data sources of which this process knows that a reward came: the recipe can have one."""

    async def score(
        self, task: Task, solution: str, further: Mapping[str, Any], keeper: ScoreKeeper | None = None
    ) -> Score:
        """Return the score; 0, with the metric ``reward/no_reward``, if the policy prevented one.

        `further` joins the row's `extra_info`; `keeper` knows which rewards came in the run. Raises `InfraFailure`,
        also where none of the data source came yet: a recipe that cannot have one (a wrong file or pattern) must not
        train on zeros. Raises `QueueError` with a `keeper`.
        """
        source, extra = task.data_source, {**task.extra_info, **further}
        proof = proof_of(self._name, self._settings, source)
        answer = Answer(source, solution, task.ground_truth, extra, task.messages)
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                value = await self._reward.score(answer)
        except NoReward as error:
            if source not in self._proven and not (keeper and await keeper.is_proven(proof)):
                hint = "the run had no reward of this data source yet, so that the recipe may be wrong"
                raise InfraFailure(error.component, f"{error.reason}; {hint}") from error
            return Score(0.0, {"reward/no_reward": 1.0})
        except (InfraFailure, ToolInfraError) as error:
            raise InfraFailure(error.component, error.reason) from error
        except SandboxError as error:
            raise InfraFailure("sandbox", f"{self._name}: {error}") from error
        except USERS_FAULTS as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = f"{self._name} took longer than {self._timeout_s:g} s"
            else:
                reason = f"{self._name} raised {describe_error(error)}"
            raise InfraFailure("reward", reason) from error
        score = _to_score(value, self._name, self._reward.scored_by(source))
        if keeper is not None and source not in self._proven:
            await keeper.prove(proof)
        self._proven.add(source)
        return score

    async def score_once(
        self, task: Task, solution: str, further: Mapping[str, Any], segments: Sequence[Segment], keeper: ScoreKeeper
    ) -> Score:
        """Scores once: a score that a dead owner of the episode recorded for the same ids and row is returned.

        Raises `QueueError` as well.
        """
        if not self._reward.is_journaled(task.data_source):
            return await self.score(task, solution, further, keeper)
        digest = self._digest(task, further, segments)
        recorded = keeper.score
        if recorded is None or recorded.of != digest:
            score = await self.score(task, solution, further, keeper)
            recorded = RecordedScore(digest, score.reward, score.metrics)
            await keeper.keep_score(recorded)
        return Score(recorded.reward, recorded.metrics)

    def _digest(self, task: Task, further: Mapping[str, Any], segments: Sequence[Segment]) -> str:
        """Digest of all that the reward may read and of its name and settings, which a resumed run may have changed."""
        row = [task.task_id, task.data_source, task.ground_truth, task.extra_info, further]
        digest = xxhash.xxh3_128(repr((self._name, self._settings, row)).encode())
        for segment in segments:
            for ids in (segment.prompt_ids, segment.response_ids):
                digest.update(f":{len(ids)}:".encode())
                digest.update(little_endian(ids))
        return digest.hexdigest()

    async def close(self) -> None:
        await self._reward.close()


def proof_of(name: str, settings: str, data_source: str) -> str:
    """Return the name under which a run keeps that a reward came. Other settings, as of a resumed run, need their own
    proof."""
    return f"{name} {xxhash.xxh3_64_hexdigest(settings.encode())} {data_source}"


def load_reward(config: AgentConfig, recipe_dir: Path, sandbox: Sandbox | None = None) -> RewardFunction | None:
    """The reward that `agent.reward` names; None: loops or tools give the rewards. Raises `LoadError`."""
    name, rewards = config.reward, config.rewards
    if not name:
        return None
    if name == BY_SOURCE:
        reward: BaseReward = BySource(rewards.sources, recipe_dir, sandbox)
    else:
        reward = make_reward(RewardChoice(name=name, settings=rewards.settings), recipe_dir, sandbox)
    return RewardFunction(reward, name, rewards.timeout_s, rewards.model_dump_json(exclude={"timeout_s"}))


def check_reward(config: AgentConfig, data_sources: Iterable[str]) -> None:
    """Checks before a run that the reward can be created, and that every data source has one. Raises `LoadError`.

    Works without a sandbox: whether one can be created is a separate check.
    """
    if config.reward != BY_SOURCE:
        load_reward(config, Path(), _NoSandbox())
        return
    BySource(config.rewards.sources, Path(), _NoSandbox()).check(data_sources)


class _NoSandbox:
    """Stands in for the worker's sandbox while a recipe is checked."""

    def check_needs(self, needs: BoxNeeds) -> None:
        """`start` says it."""

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> Session:
        raise SandboxError("no sandbox is available while a recipe is checked")

    async def attach(self, session_id: str) -> Session:
        raise SandboxError("no sandbox is available while a recipe is checked")

    async def close(self) -> None:
        """Nothing was opened."""


def may_need_sandbox(config: AgentConfig) -> bool:
    """Returns whether a worker without tools should try to make a sandbox for its rewards."""
    names = {config.reward, *(getattr(choice, "name", choice) for choice in config.rewards.sources.values())}
    return bool(names & {"code", "reasoning_gym", BY_SOURCE})


def _to_score(value: Any, name: str, scored_by: Callable[..., Any]) -> Score:
    further: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(str, value))
            problem = f"{name} returned a dict without 'score' (keys: {keys}){defined_at(scored_by)}"
            raise InfraFailure("reward", problem)
        numbers = {key: finite_number(entry) for key, entry in value.items() if key != "score"}
        further = {f"reward/{key}": number for key, number in numbers.items() if number is not None}
        value = value["score"]
    reward = finite_number(value)
    if reward is None:
        raise InfraFailure("reward", f"{name} returned {value!r:.80}, not a finite number{defined_at(scored_by)}")
    return Score(reward, further)


def choice_for(data_source: str, own: Mapping[str, str | RewardChoice]) -> RewardChoice:
    """The recipe's choice, exact names before patterns, then verl's. Raises `LoadError` for an unknown name."""
    for table in (own, DATA_SOURCES):
        choice = entry_of(table, data_source)
        if choice is not None:
            return choice if isinstance(choice, RewardChoice) else RewardChoice(name=choice)
    hint = nearest(data_source, (*own, *DATA_SOURCES)) or "; add it to agent.rewards.sources"
    raise LoadError(f"no reward for data_source {data_source!r}{hint}")


def make_reward(choice: RewardChoice, recipe_dir: Path, sandbox: Sandbox | None) -> BaseReward:
    """Raises `LoadError` naming the reward, or the setting, that cannot be."""
    target = _find(choice.name, recipe_dir)
    try:
        if choice.settings and callable(target):
            _refuse_unknown(target, choice.settings)
        if isinstance(target, type) and issubclass(target, BaseReward):
            if target.needs_sandbox and sandbox is None:
                raise ValueError("it needs a sandbox, and this process has none")
            return target(sandbox, **choice.settings)
        if callable(target):
            function = partial(target, **choice.settings) if choice.settings else target
            return FunctionReward(function, choice.name, journaled=choice.name not in REWARDS)
    except (TypeError, ValueError) as error:
        raise LoadError(f"reward {choice.name!r} with settings {choice.settings}: {error}") from error
    raise LoadError(f"reward {choice.name!r} is not a function")


def _refuse_unknown(reward: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raises `TypeError` naming a setting that the function, or the class, does not have."""
    parameters = inspect.signature(reward).parameters.values()
    known = [one.name for one in parameters if one.name not in (*PARAMETERS, "sandbox")]
    unknown = [name for name in settings if name not in known]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        problem = f"{getattr(reward, '__name__', reward)} has no parameter {unknown[0]!r}"
        raise TypeError(f"{problem}; {near_and_known(unknown[0], known)}")


def _find(name: str, recipe_dir: Path) -> Any:
    if name in REWARDS:
        return load_object(REWARDS[name], recipe_dir)
    if ":" not in name and "." not in name:
        raise LoadError(f"no reward {name!r}{nearest(name, REWARDS)} (known: {', '.join(sorted(REWARDS))}, or a path)")
    return load_object(name, recipe_dir)


class BySource(BaseReward):
    """A reward per data source. The recipe's are created at once, which reports mistakes early; verl's on first use."""

    def __init__(self, own: Mapping[str, str | RewardChoice], recipe_dir: Path, sandbox: Sandbox | None = None) -> None:
        """Raises `LoadError`."""
        super().__init__(sandbox)
        self._own = own
        self._recipe_dir = recipe_dir
        self._rewards: dict[str, BaseReward] = {}
        for data_source in own:
            self._reward_for(data_source)

    def check(self, data_sources: Iterable[str]) -> None:
        """Raises `LoadError` if one of the sources has no reward, or its reward cannot be created."""
        for data_source in sorted(data_sources):
            self._reward_for(data_source)

    async def score(self, answer: Answer) -> Value:
        return await self._reward_for(answer.data_source).score(answer)

    def is_journaled(self, data_source: str) -> bool:
        return self._reward_for(data_source).is_journaled(data_source)

    def scored_by(self, data_source: str) -> Callable[..., Any]:
        return self._reward_for(data_source).scored_by(data_source)

    async def close(self) -> None:
        for reward in self._rewards.values():
            await reward.close()

    def _reward_for(self, data_source: str) -> BaseReward:
        """Sources of one choice share the reward, and with it its processes, cache and limits."""
        choice = choice_for(data_source, self._own)
        key = choice.model_dump_json()
        if key not in self._rewards:
            self._rewards[key] = make_reward(choice, self._recipe_dir, self.sandbox)
        return self._rewards[key]
