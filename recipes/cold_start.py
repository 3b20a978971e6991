"""Supervised fine-tuning before reinforcement learning: a model is shown how the recipe's tools are used.

    python recipes/cold_start.py recipes/retool/cpu.yaml --out data/retool/model \\
        --policy recipes/retool/policies.py:oracle --rows 512 --steps 100 --lr 5e-4
    torchrun --nproc-per-node 8 recipes/cold_start.py recipes/retool/gpu8.yaml --out models/retool-7b \\
        --demonstrations data/retool-sft/demonstrations.jsonl --steps 375 --lr 1e-5
    penstock run recipes/retool/gpu8.yaml model=models/retool-7b

What is learned is token for token what an episode of the recipe would hold: prompts, tools and results as the agent
loop renders them, loss on what the model writes alone. A policy's episodes are played with the recipe's real tools
first, and only those that earned the full reward are shown (`extra_info.full_reward` of the row, else 1); what is
dropped, and why, is printed. Demonstrations are JSON lines with `messages` (OpenAI's form, calls as `tool_calls`). The
model, dtype, parallelism and pack size are the recipe's; the folder that is written is a model like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.agent_loops import AgentError, Budget, ChatTokens, EnvCheck, load_object
from penstock.agent_loops.chat import chat_of
from penstock.deploy import ConfigError, RunConfig, full_reward, load_config, rehearse_recipe, rows_of
from penstock.sandbox import SandboxError
from penstock.tools import ToolConfigError, close_tools, make_tools
from penstock.trainer import DataError, Outputs, Pack, Ranks, Row, TrainerConfig, make_row, pack_rows, save_final_model
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.transfer_queue import OutcomeKind, Segment, Trajectory

CAUSES = 5
"""Of dropped demonstrations that are named."""
RANKS_TIMEOUT_S = 1800.0
"""One rank may play episodes or load a model for so long while another waits for it."""
UNBOUNDED = 1 << 30
USER = {"role": "user", "content": "x"}


class BadDemonstration(ValueError):
    """The text names the file, the line and what is wrong."""


MISTAKES = (BadDemonstration, ConfigError, DataError, AgentError, SandboxError, ToolConfigError)
"""Of people: told in one line."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    try:
        run(load_config(options.recipe, options.overrides), options)
    except MISTAKES as error:
        sys.exit(str(error))


def run(config: RunConfig, options: argparse.Namespace) -> None:
    torch.set_num_threads(config.trainer.threads)
    ranks = Ranks.open(RANKS_TIMEOUT_S, config.trainer.parallel.layout)
    try:
        segments = list(read(options.demonstrations, config) if options.demonstrations else played(config, options))
        fit(config, segments, options, ranks)
    finally:
        ranks.close()


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value ...")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--policy", help="FILE.py:function, played on the recipe's training rows")
    source.add_argument("--demonstrations", type=Path, help="JSON lines with messages")
    parser.add_argument("--rows", type=int, default=512, help="of the training rows that a policy plays")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="demonstrations per step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_intermixed_args(arguments)


# what is shown --------------------------------------------------------------------------------------------------------
def played(config: RunConfig, options: argparse.Namespace) -> list[Segment]:
    """Episodes of a policy that earned the full reward. Each rank plays all: the same policy says the same."""
    rows = rows_of(config, "train", options.rows)
    found = asyncio.run(rehearse_recipe(config, load_object(options.policy, Path.cwd()), rows))
    wanted = [full_reward(row) for row in rows]
    shown = [one for one in found.trajectories if one.reward == wanted[row_of(one)]]
    dropped = why_dropped(found, wanted)
    if not shown:
        raise BadDemonstration(f"{options.policy} solved none of {len(rows)} rows: {listed(dropped)}")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(shown)} of {len(rows)} episodes are shown; dropped: {listed(dropped)}")
    return [segment for one in shown for segment in one.segments]


def why_dropped(found: EnvCheck, wanted: Sequence[float]) -> Counter[str]:
    """Episodes that are not shown, by cause."""
    causes = Counter(f"failed ({letter.outcome.component}: {letter.outcome.reason})" for letter in found.failures)
    for one in found.trajectories:
        full = wanted[row_of(one)]
        if one.reward != full:
            ended = "" if one.outcome.kind is OutcomeKind.COMPLETED else f", {one.outcome.kind} ({one.outcome.reason})"
            reward = "none" if one.reward is None else f"{one.reward:g}"
            causes[f"with reward {reward}, not {full:g}{ended}"] += 1
    return causes


def row_of(one: Trajectory) -> int:
    return int(one.task_id.rpartition("/")[2])


def listed(dropped: Counter[str]) -> str:
    return "; ".join(f"{count} {cause}" for cause, count in dropped.most_common(CAUSES)) or "none"


def read(path: Path, config: RunConfig) -> Iterator[Segment]:
    """Raises `BadDemonstration`."""
    chat = chat_of(config.model, config.agent).for_episode(Budget(UNBOUNDED, UNBOUNDED))
    schemas = asyncio.run(schemas_of(config))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            messages = json.loads(line)["messages"]
            yield segment_of(chat, messages, schemas)
        except (ValueError, KeyError, TypeError) as error:
            raise BadDemonstration(f"{path}, line {number}: {error!r}") from error


async def schemas_of(config: RunConfig) -> list[Any]:
    """What the recipe's prompts show of its tools; nothing is run."""
    from penstock.deploy.preflight import open_sandbox

    sandbox = open_sandbox(config) if config.tools else None
    tools = make_tools(config.tools, sandbox, partial(load_object, recipe_dir=Path.cwd()))
    try:
        return [tool.schema for tool in tools.values()]
    finally:
        await close_tools(tools.values())
        if sandbox is not None:
            await sandbox.close()


def segment_of(chat: ChatTokens, messages: Sequence[dict[str, Any]], schemas: Sequence[Any]) -> Segment:
    """A conversation as an episode of it would hold it: prompt, then answers (mask 1) and what was fed (mask 0).

    Raises `ValueError` where it does not begin with messages to the model and end with one of it.
    """
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not said or said[0] == 0 or said[-1] != len(messages) - 1:
        raise ValueError("a demonstration begins with a prompt and ends with what the model answers")
    segment = chat.start(messages[: said[0]], schemas)
    for number, following in zip(said, [*said[1:], len(messages)], strict=True):
        ids = [*chat.encode(answer_text(chat, messages[number])), chat.turn_end_id]
        segment.append_sampled(ids, [0.0] * len(ids), [(0, 0, len(ids))], "stop")
        if following < len(messages):
            segment.observe(chat.render(messages[number + 1 : following], schemas))
    output = segment.output()
    return Segment(
        output.prompt_ids,
        output.response_ids,
        output.response_mask,
        output.response_logprobs,
        output.version_spans,
        output.turn_starts,
    )


def answer_text(chat: ChatTokens, message: dict[str, Any]) -> str:
    """What the model has to write for `message`, as its own template writes it, without the end of the turn."""
    conversation = chat.template.fitted([USER, message])
    opening, closed = chat.template.render([USER], prompt=True), chat.template.render(conversation, prompt=False)
    if not closed.startswith(opening):
        raise ValueError("the chat template opens a written answer otherwise than one that is to be sampled")
    return closed[len(opening) :].rpartition(chat.decode([chat.turn_end_id]))[0]


# learning -------------------------------------------------------------------------------------------------------------
def fit(config: RunConfig, segments: Sequence[Segment], options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Next-token loss on what the model wrote; returns the loss of each step, in nats per token."""
    settings = settings_of(config.trainer, options)
    engine = FSDPEngine(config.model, settings, ranks)
    rows = fitting(segments, engine, ranks)
    losses = []
    for step, chosen in enumerate(batches(len(rows), options)):
        mine = [rows[number] for number in chosen[ranks.data.rank :: ranks.data.world]]
        packs = pack_rows(mine, settings.micro_batch_tokens)
        tokens = ranks.data.sum(sum(len(row.targets) for row in mine))
        update = engine.update(packs, negative_log_likelihood, tokens, step)
        losses.append(update.loss)
        if ranks.is_rank0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:5d}  loss {update.loss:.4f}  gradient {update.grad_norm:.3f}", flush=True)
    save_final_model(engine, ranks, config.model, options.out)
    return losses


def settings_of(trainer: TrainerConfig, options: argparse.Namespace) -> TrainerConfig:
    """The recipe's trainer without its algorithm; a short warm-up, then a linear decay."""
    usual = TrainerConfig()
    return trainer.model_copy(
        update={
            "steps": options.steps,
            "lr": options.lr,
            "warmup_steps": max(1, options.steps // 20),
            "lr_schedule": "linear",
            "advantage": usual.advantage,
            "kl": usual.kl,
            "entropy_bonus": 0.0,
            "eps": usual.eps,
            "max_grad_norm": usual.max_grad_norm,
        }
    )


def fitting(segments: Sequence[Segment], engine: FSDPEngine, ranks: Ranks) -> list[Row]:
    """Demonstrations that the model's context holds; how many it does not is told."""
    limit = engine.limits.context
    kept = [one for one in segments if len(one.prompt_ids) + len(one.response_ids) <= limit]
    if ranks.is_rank0:
        long = len(segments) - len(kept)
        print(f"{len(kept)} demonstrations" + (f"; {long} longer than {limit} tokens left out" if long else ""))
    if not kept:
        raise BadDemonstration(f"no demonstration fits the model's context of {limit} tokens")
    return [
        make_row(number, one, f"demonstration {number}", step=0, bound=0, model=engine.limits)
        for number, one in enumerate(kept)
    ]


def batches(count: int, options: argparse.Namespace) -> Iterator[list[int]]:
    """`options.steps` times `options.batch` indices below `count`, epoch after epoch, in an order from the seed."""
    dice, waiting = random.Random(options.seed), list[int]()
    for _ in range(options.steps):
        while len(waiting) < options.batch:
            waiting += dice.sample(range(count), count)
        yield waiting[: options.batch]
        del waiting[: options.batch]


def negative_log_likelihood(pack: Pack, outputs: Outputs) -> Tensor:
    return -outputs.logprobs.sum()


if __name__ == "__main__":
    main()
