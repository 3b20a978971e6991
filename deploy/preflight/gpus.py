"""GPUs: enough of them, in reach of each other, and with the memory that ranks and engines take."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.gpus import gpus_of_server, has_gpu
from penstock.deploy.preflight.check import Check, skipped, warning
from penstock.deploy.preflight.memory import model_shape, needs_critic
from penstock.deploy.preflight.memory_sums import Shape, server_bytes, trainer_bytes
from penstock.deploy.preflight.resources import human

USABLE = 0.9
"""Of a device's memory: the rest is the driver's, fragments, and NCCL's buffers."""


def check_gpus(config: RunConfig) -> Iterator[Check]:
    if not has_gpu():
        yield skipped("gpus", "no NVIDIA driver on this machine: everything runs on CPUs")
        return
    if importlib.util.find_spec("torch") is None:
        yield skipped("gpus", "torch is not installed here")
        return
    import torch

    count = torch.cuda.device_count()
    if not count:
        mend = "install a torch that was built for this driver's CUDA, or give the container its devices (--gpus all)"
        yield Check("gpus", False, f"a driver is here, and torch {torch.__version__} sees no device", mend)
        return
    yield _enough(config, count, [torch.cuda.get_device_name(index) for index in range(count)])
    if config.trainer.ranks > 1:
        yield _together(torch, min(config.trainer.ranks, count))
    shape = model_shape(config)
    if shape is not None:
        yield _memory(config, shape, min(torch.cuda.get_device_properties(i).total_memory for i in range(count)))


def _enough(config: RunConfig, count: int, names: list[str]) -> Check:
    ranks, each = config.trainer.ranks, gpus_of_server(config.rollout)
    servers = config.rollout.servers
    found = f"{count} ({', '.join(sorted(set(names)))}); {ranks} ranks, {servers} servers of {each}"
    if ranks > count or (servers and each > count):
        mend = f"set trainer.ranks to {count} or less, and each engine's tensor parallelism, or start parts elsewhere"
        return Check("gpus", False, found, mend)
    if ranks + servers * each > count:
        mend = "start servers on other machines, or let each engine take a part of its device (gpu_memory_utilization)"
        return warning("gpus", f"{found}: trainer and engines share devices", mend)
    return Check("gpus", True, found)


def _together(torch: Any, ranks: int) -> Check:
    if not torch.distributed.is_nccl_available():
        mend = "install a torch with NCCL: the ranks' collectives need it"
        return Check("nccl", False, "this torch has none", mend)
    apart = [pair for pair in permutations(range(ranks), 2) if not torch.cuda.can_device_access_peer(*pair)]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if apart:
        found = f"NCCL {version}; {len(apart)} pairs of devices, such as {apart[0]}, do not reach each other's memory"
        return warning(
            "nccl", found, "collectives go through the host there: choose devices under one switch or NVLink"
        )
    return Check("nccl", True, f"NCCL {version}; all {ranks} devices reach each other")


def _memory(config: RunConfig, shape: Shape, have: int) -> Check:
    rank = trainer_bytes(shape, config.trainer, config.rollout.max_model_len, critic=needs_critic(config))
    if config.trainer.offload:
        rank = {name: size for name, size in rank.items() if name in ("gathered layers", "activations")}
    each = gpus_of_server(config.rollout)
    server = sum(server_bytes(shape, config, config.rollout.max_model_len).values()) / each if each else 0.0
    training = sum(rank.values())
    found = f"a rank takes about {human(training)}, an engine {human(server)} at least, a device has {human(have)}"
    if training > USABLE * have:
        mend = "more ranks, trainer.recompute=true, trainer.offload=true, a smaller trainer.micro_batch_tokens, or LoRA"
        return Check("gpu memory", False, found, mend)
    if server > USABLE * have:
        mend = "raise tensor_parallel_size (vllm_args) or tp_size (sglang_args), or lower rollout.max_model_len"
        return Check("gpu memory", False, found, mend)
    return Check("gpu memory", True, found)
