"""`penstock rehearse`: is a recipe's environment sound? Played by a script in the place of the model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.deploy.commands.shared import AsJson, Overrides, Recipe, refuse, user_errors
from penstock.deploy.recipe_tree import ConfigError

if TYPE_CHECKING:
    from penstock.deploy.config import RunConfig
    from penstock.testing import EnvCheck, Policy
    from penstock.trainer import DatasetRow

SHOWN = 5
"""Unexpected and failed episodes listed one by one."""
Names = Mapping[int, str]
"""`extra_info.instance_id` of the rows that have one, by their numbers."""


def rehearse(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    policy: Annotated[str, typer.Option(help="FILE.py:function that returns the model's next text.")],
    rows: Annotated[int, typer.Option(min=0, help="The first rows only; 0 takes all.")] = 64,
    split: Annotated[str, typer.Option(help="train or eval.")] = "train",
    expect: Annotated[
        str | None,
        typer.Option(
            help="A number, or full (extra_info.full_reward of each row, else 1): exit with 1 on another reward."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe's tasks with a scripted policy: real loop, tools, boxes, servers and reward; no model, no training.

    A policy that solves the tasks must get the full reward, one that does nothing must get none. Recipes have both.

    Example: penstock rehearse recipes/retool/cpu.yaml --policy recipes/retool/policies.py:oracle --expect 1
    """
    from penstock.agent_loops import AgentError, load_object
    from penstock.common.event_loop import run_users_code
    from penstock.deploy.config import load_config
    from penstock.deploy.preflight.agent import check_loop
    from penstock.deploy.preflight.suite import refuse_doomed
    from penstock.deploy.rehearsal import rows_of
    from penstock.sandbox import SandboxError
    from penstock.tools import ToolConfigError
    from penstock.trainer import DataError
    from penstock.transfer_queue import same_reward

    with user_errors(AgentError, SandboxError, ToolConfigError, DataError):
        config = load_config(recipe, overrides or [])
        refuse_doomed(check for check in [check_loop(config)] if check is not None)
        played = rows_of(config, split, rows)
        rewards = _expected(expect, played)
        playing = _play(config, load_object(policy, Path.cwd()), played, quiet=as_json)
        try:
            with asyncio.Runner() as runner:
                result = run_users_code(runner, playing)
        except KeyboardInterrupt:
            refuse("interrupted: a rehearsal keeps nothing; --rows plays fewer tasks", status=130)
    unexpected = [
        one for one in result.trajectories if rewards and not same_reward(one.reward, rewards[_row(one.task_id) - 1])
    ]
    names = {number: str(name) for number, row in enumerate(played, 1) if (name := row.extra_info.get("instance_id"))}
    if as_json:
        typer.echo(json.dumps(_figures(result, names)))
    else:
        part = f"rows       the first {rows}; --rows 0 takes all\n" if len(played) == rows else ""
        typer.echo(part + _report(result, unexpected, rewards, names))
    raise typer.Exit(1 if unexpected or result.failures else 0)


def _expected(expect: str | None, rows: list[DatasetRow]) -> list[float]:
    """Returns the expected reward of each row; empty if nothing is expected. Raises `ConfigError`, `DataError`."""
    from penstock.deploy.rehearsal import full_reward

    if expect is None:
        return []
    if expect == "full":
        return [full_reward(row) for row in rows]
    try:
        return [float(expect)] * len(rows)
    except ValueError:
        raise ConfigError(f"--expect {expect}: give a number, or full") from None


async def _play(config: RunConfig, policy: Policy, rows: list[DatasetRow], *, quiet: bool) -> EnvCheck:
    from rich.console import Console
    from rich.progress import Progress

    from penstock.deploy.rehearsal import rehearse_recipe

    # The worker logs each failed episode as a warning; the report groups them by cause.
    log = logging.getLogger("penstock.agent_loops.episode")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
            bar = progress.add_task("episodes", total=len(rows))
            return await rehearse_recipe(config, policy, rows, lambda ended: progress.update(bar, completed=ended))
    finally:
        log.setLevel(level)


def _figures(result: EnvCheck, names: Names) -> dict[str, Any]:
    rewards, trajectories = result.rewards, result.trajectories
    kinds = ((one.outcome.kind, f" ({one.outcome.reason})" if one.outcome.reason else "") for one in trajectories)
    outcomes = Counter(f"{kind}{reason}" for kind, reason in kinds)
    means = {
        name: fmean(one.metrics.get(name, 0.0) for one in trajectories) if trajectories else 0.0
        for name in ("num_turns", "tool_calls", "tool_errors", "response_tokens", "latency_s")
    }
    return {
        "episodes": len(trajectories),
        "failed": len(result.failures),
        "cut_answers": len(result.cut),
        "reward": {"mean": fmean(rewards), "lowest": min(rewards), "highest": max(rewards)} if rewards else {},
        "outcomes": dict(outcomes),
        "failures": [
            {
                "row": (row := _row(one.episode_id)),
                **({"instance_id": names[row]} if row in names else {}),
                "cause": f"{one.outcome.component}: {one.outcome.reason}",
            }
            for one in result.failures[:SHOWN]
        ],
        **means,
    }


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _report(result: EnvCheck, unexpected: list[Any], rewards: list[float], names: Names) -> str:
    figures = _figures(result, names)
    reward = "".join(f"  {name} {value:.3f}" for name, value in figures["reward"].items())
    if result.rewards and min(result.rewards) < max(result.rewards):
        lowest = [_row(one.task_id) for one in result.trajectories if one.reward == min(result.rewards)]
        reward += f"  the lowest in {_rows(lowest, names)}"
    outcomes = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items())
    lines = [f"episodes   {', '.join(filter(None, (outcomes, f'{len(result.failures)} failed')))}"]
    if result.trajectories:
        lines += [
            f"reward   {reward}",
            f"per episode  {figures['num_turns']:.2f} turns, {figures['tool_calls']:.2f} tool calls of which "
            f"{figures['tool_errors']:.2f} with an error, {figures['response_tokens']:.0f} tokens, "
            f"{figures['latency_s']:.2f} s",
        ]
    lines += [
        f"unexpected reward {_number(one.reward)} in {_rows([row], names)}, {rewards[row - 1]:g} was expected"
        for one in unexpected[:SHOWN]
        if (row := _row(one.task_id))
    ]
    if len(unexpected) > SHOWN:
        lines.append(f"unexpected rewards in {len(unexpected) - SHOWN} more rows")
    errors = [(_row(one.task_id), text) for one in result.trajectories for text in one.extra["tool_error_texts"]]
    failures = [(_row(one.episode_id), f"{one.outcome.component}: {one.outcome.reason}") for one in result.failures]
    groups = [*_grouped("tool error", errors, names), *_grouped("failed", failures, names)]
    return "\n".join([*lines, *_cut(result, names), *groups])


def _cut(result: EnvCheck, names: Names) -> Iterator[str]:
    """A line if the policy's answers were longer than the recipe lets a model's be."""
    if not result.cut:
        return
    longest = max(result.cut, key=lambda one: one.tokens)
    rows = _rows(sorted({_row(one.task_id) for one in result.cut}), names)
    yield (
        f"cut answers  {len(result.cut)}, in {rows}: the longest has {longest.tokens} tokens and was cut to"
        f" {longest.limit}; raise agent.max_new_tokens, or agent.max_response_tokens for all answers together"
    )


def _grouped(title: str, causes: Iterable[tuple[int, str]], names: Names) -> Iterator[str]:
    """A line for each of the commonest causes, with its first row and the number of its other episodes.

    `causes`: row and text of each.
    """
    rows = defaultdict[str, list[int]](list)
    for row, text in causes:
        rows[" ".join(text.split())].append(row)
    commonest = sorted(rows.items(), key=lambda one: -len(one[1]))
    for text, where in commonest[:SHOWN]:
        yield f"{title} in {_rows(where, names)}: {text}"
    if len(commonest) > SHOWN:
        yield f"{title}: {len(commonest) - SHOWN} more causes"


def _rows(numbers: Sequence[int], names: Names) -> str:
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    first = min(numbers)
    return f"row {first}{f' ({names[first]})' if first in names else ''}{more}"


def _row(name: str) -> int:
    """Counted from 1, as in complaints about data."""
    return int(name.rpartition("/")[2].partition("#")[0]) + 1
