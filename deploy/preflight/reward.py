"""Whether the rewards of the recipe exist, and whether one of them scores a row."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.datasets import BadSpec
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.boxes import open_sandbox
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.sources import data_sources, first_rows

if TYPE_CHECKING:
    from penstock.sandbox import Sandbox
    from penstock.trainer.data import Row

NAME = "agent.reward"
ANSWER = "penstock doctor asks whether this can be scored"
SAMPLE: Mapping[str, Any] = {
    "num_turns": 1,
    "tool_calls": 0,
    "final_answer": None,
    "tool_rewards": {},
    "final_text": ANSWER,
}
"""What a worker tells a reward beside the row."""


def check_reward(config: RunConfig) -> Check | None:
    """Rewards in the box and their settings, and under by_data_source whether every row has one."""
    from penstock.agent_loops import BY_SOURCE, LoadError, check_reward
    from penstock.agent_loops.rewards import REWARDS

    if config.agent.reward not in (*REWARDS, BY_SOURCE):
        return None  # a function of the user's: loaded by the workers, and by `check_score`
    try:
        check_reward(config.agent, data_sources(config))
    except LoadError as error:
        return Check(NAME, False, config.agent.reward, str(error))
    return Check(NAME, True, config.agent.reward)


def check_score(config: RunConfig) -> Check | None:
    """The first row of the data is scored, by a reward server or judge for real."""
    from penstock.agent_loops import InfraFailure, LoadError
    from penstock.trainer import DataError

    if not config.agent.reward:
        return None  # loops or tools give the rewards
    try:
        row = first_rows(config, 1)[0]
    except (DataError, BadSpec):
        return None  # `check_data` says so
    try:
        reward = asyncio.run(_score(config, row))
    except LoadError as error:
        return Check("reward of a row", False, config.agent.reward, str(error))
    except InfraFailure as error:
        return Check("reward of a row", False, f"{config.agent.reward} on row 1: {error}", _mend(config, error.reason))
    return Check("reward of a row", True, f"{config.agent.reward} scores row 1: {reward:g} for a wrong answer")


async def _score(config: RunConfig, row: Row) -> float:
    """As a worker does it. Raises `LoadError`, `InfraFailure`."""
    from penstock.agent_loops import load_reward

    async with _sandbox(config) as sandbox:
        reward = load_reward(config.agent, Path(), sandbox)
        assert reward is not None
        try:
            return (await reward.score(row.task("doctor/0", "train"), ANSWER, SAMPLE)).reward
        finally:
            await reward.close()


@contextlib.asynccontextmanager
async def _sandbox(config: RunConfig) -> AsyncIterator[Sandbox | None]:
    """The run's, where its rewards may need one and one can be made; `check_sandbox` says where it cannot."""
    from penstock.agent_loops import may_need_sandbox
    from penstock.sandbox import SandboxError

    sandbox: Sandbox | None = None
    if may_need_sandbox(config.agent):
        with contextlib.suppress(SandboxError):
            sandbox = open_sandbox(config)
    try:
        yield sandbox
    finally:
        if sandbox is not None:
            await sandbox.close()


def _mend(config: RunConfig, reason: str) -> str:
    if "ClientConnector" in reason or "Cannot connect" in reason:
        return "start the service that agent.rewards names, or correct its url"
    if "HTTP 401" in reason or "HTTP 403" in reason:
        return "the service refuses the token: set the environment variable of its key as the service has it"
    return f"make {config.agent.reward} return a finite number for this row, see docs/rewards.md"
