"""Checks of `penstock serve`: its settings, keys, and the memory of base model, engines, requests and adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, memory_bytes, skipped
from penstock.deploy.preflight.memory import host_parts
from penstock.deploy.preflight.memory_checks import check_host
from penstock.deploy.preflight.model_shape import model_shape
from penstock.deploy.preflight.rank_memory import BYTES, MASTER, learning_parameters
from penstock.rollout_server import ADAPTER_SLOTS
from penstock.service import BadKeys, parse_keys
from penstock.trainer import BadJob
from penstock.trainer.service import check_settings

KEYS_VARIABLE = "PENSTOCK_SERVICE_KEYS"
"""``NAME=KEY,NAME=KEY``: who may call the API."""


def check_service(config: RunConfig) -> Check:
    try:
        check_settings(config.trainer)
    except BadJob as error:
        return Check("service", False, str(error), "set what it names")
    detail = f"ranks up to {config.trainer.lora.rank}; a point every {config.trainer.checkpoint_every} optimizer steps"
    return Check("service", True, detail)


def check_keys(_config: RunConfig) -> Check:
    if KEYS_VARIABLE not in os.environ:
        return Check("keys", True, f"one is made at the first start; {KEYS_VARIABLE} gives several owners theirs")
    try:
        owners = sorted(set(parse_keys(os.environ[KEYS_VARIABLE]).values()))
    except BadKeys as error:
        return Check("keys", False, str(error), f"write {KEYS_VARIABLE}=NAME=KEY,NAME=KEY")
    return Check("keys", True, f"of {', '.join(owners)}")


def check_service_memory(config: RunConfig) -> Iterator[Check]:
    """The memory of this machine without any adapter, and how many adapters the rest has room for."""
    shape = model_shape(config)
    if shape is None:
        yield skipped("memory", f"{config.model}: its size is unknown until its files are here")
        return
    parts = {name: size for name, size in host_parts(config, shape).items() if name not in ("in flight", "checkpoint")}
    parts["processes"] -= (config.agent.workers - 1) * (300 << 20)  # there are none; the API takes about as much
    learning = learning_parameters(shape, config.trainer)
    del parts["published weights"]
    parts["adapters of servers"] = config.rollout.servers * ADAPTER_SLOTS * BYTES[config.rollout.dtype] * learning
    parts["requests"] = 0 if config.transfer_queue.url else config.transfer_queue.max_bytes
    yield check_host(parts)
    adapter = 4 * MASTER * learning  # weights, two moments, and gradients that add up
    room = memory_bytes() - sum(parts.values())
    detail = f"one of rank {config.trainer.lora.rank} takes {human(adapter)} of memory, and as much in each point"
    fix = "lower trainer.lora.rank or transfer_queue.max_bytes, or take a smaller model"
    yield Check("adapters", room >= adapter, f"{detail}; there is room for about {max(0, int(room // adapter))}", fix)
