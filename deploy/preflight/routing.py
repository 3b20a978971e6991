"""Checks of routing replay: can engine and trainer do it, and what does it cost in bytes?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.rollout_server import MixtureLayers, mixture_layers
from penstock.transfer_queue import BYTES_PER_TOKEN

NAME = "rollout.routing_replay"
REPLAYING = ("fsdp", "megatron")
"""Trainer engines that replay."""


def check_routing_replay(config: RunConfig) -> Check | None:
    """Only if it is enabled."""
    if not config.rollout.routing_replay:
        return None
    for wrong, detail, fix in _obstacles(config):
        if wrong:
            return Check(NAME, False, detail, fix)
    try:
        layers = _layers(config)
    except ValueError as error:
        return Check(NAME, False, str(error), "rollout.routing_replay=false")
    cost = "" if layers is None else f", {layers.token_bytes} bytes per token of prompt and response"
    return Check(NAME, True, f"recorded by {config.rollout.engine}{cost}")


def _obstacles(config: RunConfig) -> Iterator[tuple[bool, str, str]]:
    """(whether it is there, what, the fix)"""
    trainer, engine, recomputes = config.trainer, config.rollout.engine, config.rollout.pause == "recompute"
    yield engine == "served", "a served model reports no routed experts", "rollout.engine=hf, vllm or sglang"
    yield (
        recomputes and engine != "hf",
        f"under rollout.pause=recompute {engine} would report the experts of other weights",
        "rollout.pause=keep or abort",
    )
    yield (
        trainer.engine not in REPLAYING,
        f"trainer.engine {trainer.engine} does not replay",
        f"trainer.engine={' or '.join(REPLAYING)}",
    )
    yield trainer.compile, "trainer.compile compiles the routers too", "trainer.compile=false"


def token_bytes(config: RunConfig) -> int:
    """About what a sampled token takes in the queue. A wrong model is reported by `check_routing_replay`."""
    # A logprob, and id and logprob of each of its likeliest ids: of the teacher that gives most.
    top_ks = config.agent.teacher_top_k
    known = BYTES_PER_TOKEN + (4 + 8 * max(top_ks) if top_ks else 0)
    if not config.rollout.routing_replay:
        return known
    try:
        layers = _layers(config)
    except ValueError:
        return known
    return known + (layers.token_bytes if layers else 0)


def _layers(config: RunConfig) -> MixtureLayers | None:
    """None for a model that is not here: the engine looks at it when it starts. Raises `ValueError`."""
    file = Path(config.model) / "config.json"
    return mixture_layers(json.loads(file.read_text())) if file.is_file() else None
