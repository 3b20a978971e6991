"""Prepares the files that the ranks read from the sources of a recipe's section `sft`.

    sft.messages ─┐                                                    ┌─► data/train.safetensors
    sft.runs     ─┼─► segments ─► bad rows, long rows ─► held out? ────┼─► data/validation.safetensors
    sft.policy   ─┘                                                    └─► data/about.json, written last

They are made once: a resumed run trains on the rows that it began with, even where their sources have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.agent_loops import BadDemonstration, ChatTokens, TemplateError, load_object, segments_of
from penstock.agent_loops.chat import chat_of, verify_template
from penstock.common import write_atomically
from penstock.common.event_loop import run_users_code
from penstock.deploy.config import NO_TASKS, RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.rehearsal import full_reward, rehearse_recipe, rows_of
from penstock.deploy.sft.message_files import check_calls, parameters_of, read_rows
from penstock.deploy.sft.recorded import choose_recorded, recorded_segments
from penstock.rollout_server import context_length, no_torch
from penstock.testing import EnvCheck
from penstock.tools import close_tools, make_tools
from penstock.trainer import write_conversations
from penstock.transfer_queue import OutcomeKind, Segment, Trajectory, is_reached

NAMED = 5
"""Causes, and bad rows, that are named."""
logger = logging.getLogger("penstock.sft")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PreparedData:
    """data/about.json."""

    conversations: int
    """Rows that are trained on; one whose history the template rewrites counts once per part."""
    tokens: int
    tokens_trained: int
    validation: int
    left_out: Mapping[str, int]
    """Number of rows that were left out, by cause."""
    settings: str
    """Digest of what they follow from."""


@dataclass(slots=True)
class Findings:
    """Rows that were left out so far."""

    skips: bool
    """sft.bad_rows: skip"""
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """The first bad rows, in words."""

    def refuse(self, error: BadDemonstration) -> None:
        """Raises it, unless bad rows are skipped."""
        if not self.skips:
            raise error
        self.dropped["bad rows"] += 1
        if len(self.bad) < NAMED:
            self.bad.append(str(error))


def prepare(config: RunConfig, folder: Path, changes: Sequence[str] = ()) -> PreparedData:
    """The files in `folder`, made if they are not there. `changes`: settings since they were made, for the message.

    Raises `ConfigError`, `BadDemonstration`, `AgentError`,
    `SandboxError`, `DataError`."""
    about, digest = folder / "about.json", _digest(config)
    if about.exists():
        existing = PreparedData(**json.loads(about.read_text(encoding="utf-8")))
        if existing.settings != digest:
            changed = "; ".join(changes) or "settings have changed"
            raise ConfigError(f"sft: this run began with other data ({changed}); start one with another name=…")
        return existing
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):  # of a life that ended before its about.json
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
    findings = Findings(config.sft.bad_rows == "skip")
    chat = chat_of(config.model, config.agent)
    train, validation = _split(config, list(_short(config, _conversations(config, chat, findings), findings)))
    for conversation in _short(config, _of_files(config.sft.validation, config, chat, findings), findings):
        validation += conversation
    for complaint in findings.bad:
        logger.warning("left out: %s", complaint)
    if not train:
        raise ConfigError(f"sft: no conversation to train on; left out: {listed(findings.dropped)}")
    write_conversations(folder / "train.safetensors", train)
    if validation:
        write_conversations(folder / "validation.safetensors", validation)
    tokens = sum(len(one.prompt_ids) + len(one.response_ids) for one in train)
    trained = sum(int(one.response_mask.sum()) for one in train)
    data = PreparedData(len(train), tokens, trained, len(validation), dict(findings.dropped), digest)
    write_atomically(about, json.dumps(asdict(data), indent=1) + "\n", durable=True)
    return data


def listed(dropped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {cause}" for cause, count in Counter(dropped).most_common(NAMED) if count) or "none"


# sources -----------------------------------------------------------------------------------------------------------
def _conversations(config: RunConfig, chat: ChatTokens, findings: Findings) -> Iterator[Sequence[Segment]]:
    sft = config.sft
    if not (sft.messages or sft.runs or sft.policy):
        raise ConfigError("sft: nothing to train on; set sft.messages (files), sft.runs (folders) or sft.policy")
    yield from _of_files(sft.messages, config, chat, findings)
    for folder in sft.runs:
        for episode in choose_recorded(Path(folder), sft, findings.dropped):
            try:
                yield recorded_segments(episode, chat)
            except BadDemonstration as error:
                findings.refuse(error)
    if sft.policy:
        # Episodes of a policy that earned the full reward, or sft.min_reward.
        if config.data.train == NO_TASKS:
            raise ConfigError("sft.policy plays tasks of data.train, and the recipe has none: set data.train")
        rows = rows_of(config, "train", config.sft.policy_rows)
        playing = rehearse_recipe(config, load_object(sft.policy, Path.cwd()), rows)
        with asyncio.Runner() as runner:
            result = run_users_code(runner, playing)
        rewards = [full_reward(row) if sft.min_reward is None else sft.min_reward for row in rows]
        causes = why_dropped(result, rewards)
        shown = [one for one in result.trajectories if _is_enough(one, rewards[_row(one)])]
        if not shown:
            raise ConfigError(f"sft.policy: {sft.policy} solved none of {len(rows)} tasks: {listed(causes)}")
        findings.dropped.update(causes)
        for one in shown:
            yield one.segments


def _of_files(
    paths: Iterable[str], config: RunConfig, chat: ChatTokens, findings: Findings
) -> Iterator[Sequence[Segment]]:
    usual: Tools | None = None
    verified: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for path in paths:
        for row in read_rows(Path(path)):
            if isinstance(row, BadDemonstration):
                findings.refuse(row)
                continue
            if row.tools is None and usual is None:
                usual = asyncio.run(tools_of(config))
            tools = row.tools if row.tools is not None else usual or ()
            if (key := json.dumps(tools, sort_keys=True)) not in verified:
                try:
                    verify_template(chat, tools)  # a `TemplateError` is of every row with these tools
                except TemplateError as error:
                    raise TemplateError(f"{row.where}: {error}" if row.tools else str(error)) from error
                verified[key] = parameters_of(tools)
            try:
                segments = segments_of(chat, row.messages, tools)
                if tools:
                    check_calls(row.messages, verified[key])
                yield segments
            except (BadDemonstration, TemplateError, RecursionError) as error:
                findings.refuse(BadDemonstration(f"{row.where}: {error}"))


async def tools_of(config: RunConfig) -> Tools:
    """Return the tool schemas that the recipe's prompts show; nothing is run."""
    from penstock.deploy.preflight.sandbox import open_sandbox, tools_need_boxes

    sandbox = open_sandbox(config) if tools_need_boxes(config) else None
    tools = make_tools(config.tools, sandbox, partial(load_object, recipe_dir=Path.cwd()))
    try:
        return [tool.schema for tool in tools.values()]
    finally:
        await close_tools(tools.values())
        if sandbox is not None:
            await sandbox.close()


def why_dropped(result: EnvCheck, rewards: Sequence[float]) -> Counter[str]:
    """A policy's episodes that are not trained on, by cause."""
    causes = Counter(f"failed ({letter.outcome.component}: {letter.outcome.reason})" for letter in result.failures)
    for one in result.trajectories:
        full = rewards[_row(one)]
        if not _is_enough(one, full):
            ended = "" if one.outcome.kind is OutcomeKind.COMPLETED else f", {one.outcome.kind} ({one.outcome.reason})"
            reward = "none" if one.reward is None else f"{one.reward:g}"
            causes[f"with reward {reward}, below {full:g}{ended}"] += 1
    return causes


def _is_enough(one: Trajectory, reward: float) -> bool:
    return one.reward is not None and is_reached(one.reward, reward)


def _row(one: Trajectory) -> int:
    return int(one.task_id.rpartition("/")[2])


# choosing ----------------------------------------------------------------------------------------------------------
def _short(
    config: RunConfig, conversations: Iterable[Sequence[Segment]], findings: Findings
) -> Iterator[Sequence[Segment]]:
    """Without the rows that are longer than the model's context, or than sft.max_tokens.

    Raises `ConfigError` for an sft.max_tokens beyond the context.
    """
    with no_torch():
        from transformers import AutoConfig

        context = context_length(AutoConfig.from_pretrained(config.model).get_text_config().to_dict())
    limit = config.sft.max_tokens or context
    if limit > context:
        raise ConfigError(f"sft.max_tokens: {limit} is more than the {context} positions of {config.model}")
    for segments in conversations:
        fitting = [one for one in segments if len(one.prompt_ids) + len(one.response_ids) <= limit]
        if len(fitting) < len(segments):
            findings.dropped[f"longer than {limit} tokens"] += len(segments) - len(fitting)
        if fitting:
            yield fitting


def _split(config: RunConfig, conversations: Sequence[Sequence[Segment]]) -> tuple[list[Segment], list[Segment]]:
    """Rows (to train on, held out): conversations that begin alike on one side, chosen by the seed.

    Raises `ConfigError` for a share that holds out nothing.
    """
    prompts = list(dict.fromkeys(_beginning(segments) for segments in conversations))
    share = config.sft.validation_share
    count = int(share * len(prompts))
    if share and prompts and not count:
        least = math.ceil(1000 / len(prompts)) / 1000
        raise ConfigError(
            f"sft.validation_share: {share:g} of {len(prompts)} prompts is none; set {least:g} or more, or 0"
        )
    held_out = set(random.Random(f"{config.seed}/validation").sample(prompts, count))
    sides: tuple[list[Segment], list[Segment]] = ([], [])
    for segments in conversations:
        sides[_beginning(segments) in held_out].extend(segments)
    return sides


def _beginning(segments: Sequence[Segment]) -> bytes:
    return segments[0].prompt_ids.tobytes()


def _digest(config: RunConfig) -> str:
    """Return a digest of everything that determines the files and the order of their rows in batches."""
    chosen = {
        "sft": config.sft.model_dump(
            mode="json",
            include={
                *("messages", "runs", "policy", "policy_rows", "min_reward", "newest_versions", "per_task"),
                *("bad_rows", "validation", "validation_share", "max_tokens", "batch"),
            },
        ),
        "model": config.model,
        "seed": config.seed,
        "data": config.data.train,
        "tools": [tool.model_dump(mode="json") for tool in config.tools],
        "agent": config.agent.model_dump(mode="json", include={"parser", "thinking_history", "template_settings"}),
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]
