"""Rewards by name, and which one verl's `data_source` names stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import LoadError
from penstock.agent_loops.load import load_object, nearest
from penstock.agent_loops.rewards.base import BaseReward
from penstock.agent_loops.rewards.config import RewardChoice
from penstock.agent_loops.rewards.function import FunctionReward
from penstock.sandbox import Sandbox

PACKAGE = "penstock.agent_loops.rewards"
REWARDS = {
    "gsm8k": f"{PACKAGE}.gsm8k:compute_score",
    "maths": f"{PACKAGE}.maths:Maths",
    "code": f"{PACKAGE}.programs:Programs",
    "search_em": f"{PACKAGE}.search_qa:exact_match",
    "search_f1": f"{PACKAGE}.search_qa:f1",
    "reward_server": f"{PACKAGE}.reward_server:RewardServer",
    "judge": f"{PACKAGE}.judge:Judge",
}
"""Name → path, imported when it is used."""

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
}
"""verl's names, and patterns of them → name of a reward."""


def choice_for(data_source: str, own: Mapping[str, str | RewardChoice]) -> RewardChoice:
    """The recipe's choice, exact names before patterns, then verl's. Raises `LoadError` where nobody knows the name."""
    for table in (own, DATA_SOURCES):
        name = data_source if data_source in table else _matching(data_source, table)
        if name is not None:
            found = table[name]
            return found if isinstance(found, RewardChoice) else RewardChoice(name=found)
    known = (*own, *DATA_SOURCES)
    raise LoadError(
        f"no reward for data_source {data_source!r}{nearest(data_source, known)}; add it to agent.rewards.sources"
    )


def _matching(data_source: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(data_source, pattern)), None)


def make_reward(choice: RewardChoice, recipe_dir: Path, sandbox: Sandbox | None) -> BaseReward:
    """Raises `LoadError` naming the reward, or the setting, that cannot be."""
    found = _find(choice.name, recipe_dir)
    try:
        if isinstance(found, type) and issubclass(found, BaseReward):
            if found.needs_sandbox and sandbox is None:
                raise ValueError("it needs a sandbox, and this process has none")
            return found(sandbox, **choice.settings)
        if callable(found):
            return FunctionReward(partial(found, **choice.settings) if choice.settings else found, choice.name)
    except (TypeError, ValueError) as error:
        raise LoadError(f"reward {choice.name!r} with settings {choice.settings}: {error}") from error
    raise LoadError(f"reward {choice.name!r} is not a function")


def _find(name: str, recipe_dir: Path) -> Any:
    if name in REWARDS:
        return load_object(REWARDS[name], recipe_dir)
    if ":" not in name and "." not in name:
        raise LoadError(f"no reward {name!r}{nearest(name, REWARDS)} (known: {', '.join(sorted(REWARDS))}, or a path)")
    return load_object(name, recipe_dir)
