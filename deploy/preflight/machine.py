"""Checks of this machine's limits: open files, threads, and the number, connections and memory of its GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from penstock.common import cores
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, memory_bytes, skipped, warning
from penstock.deploy.preflight.memory import server_bytes
from penstock.deploy.preflight.memory_checks import Gpus, check_device
from penstock.deploy.preflight.model_shape import find_shape, model_shape
from penstock.deploy.preflight.rank_memory import device_parts, rank_bytes, states_bytes
from penstock.deploy.preflight.settings import GPU_DEVICES
from penstock.deploy.preflight.torch_builds import TorchBuild, build_of, driver_version, newer_driver
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import (
    NODES_VARIABLE,
    gpus_of_server,
    has_gpu,
    lent_servers,
    places_of_server,
    smallest_gpu_bytes,
)

QUEUE = 5
"""Requests in a server per slot: one is decoded, four wait."""


def check_open_files(config: RunConfig) -> Check:
    """Roles raise the soft limit themselves; the hard one is what counts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Of an episode: a box's sockets and pipes, a request, a tool's connection.
    worker = config.agent.concurrency * 6 if config.agent.workers else 0
    # Of a request: the client's connection and the engine's.
    server = config.rollout.max_concurrent * QUEUE * 2 if config.rollout.servers else 0
    # Files that one member of a broadcast opens: it is in a group with all workers for each of the trainer's ranks.
    rollout = config.rollout
    each = (gpus_of_server(rollout) or 1) if rollout.receives_in_place else 1
    workers = (rollout.servers + lent_servers(config)) * each
    # gloo opens five files on each member of a broadcast's group, in addition to its connections to the workers.
    broadcast = config.trainer.ranks * (workers + 5) if rollout.manifest_transport == "broadcast" else 0
    # 256: libraries, logs, the queue's connections (64 at most), the model's files.
    needed = 256 + max(worker, server + broadcast)
    granted = "any number of" if hard == resource.RLIM_INFINITY else hard
    return Check(
        "open files",
        hard == resource.RLIM_INFINITY or hard >= needed,
        f"a role may open {granted} files, the busiest needs about {needed}",
        f"`ulimit -Hn {needed}` before the run (limits.conf, LimitNOFILE= or --ulimit nofile={needed}), or lower"
        " agent.concurrency and rollout.max_concurrent",
    )


def check_threads(config: RunConfig) -> Check | None:
    rollout, trainer, have = config.rollout, config.trainer, cores()
    if not rollout.servers and not trainer.ranks:
        return None
    rank_threads = trainer.threads or 1  # the default is at most a rank's share of what is there
    threads = {"rollout.threads": rollout.threads if rollout.servers else 0, "trainer.threads": rank_threads}
    key, most = max(threads.items(), key=lambda item: item[1])
    ranks_here = trainer.ranks // trainer_nodes()
    of_rank = trainer.threads_of_rank(have, ranks_here, on_gpu=has_gpu()) if trainer.ranks else 0
    servers, ranks = f"{rollout.servers} servers of {rollout.threads}", f"{ranks_here} ranks of {of_rank}"
    detail = f"{have} cores; threads: {servers}, {ranks}"
    if most > have:
        return Check(
            "threads", False, detail, f"set {key}={have:g} or less: threads that share a core wait for each other"
        )
    if rollout.servers * rollout.threads + ranks_here * rank_threads > have:
        return warning("threads", detail, "fewer servers, ranks or threads: together they ask for more than there is")
    return Check("threads", True, detail)


def trainer_nodes() -> int:
    """Machines that the trainer's ranks are spread over."""
    return int(os.environ.get(NODES_VARIABLE) or 1)


def check_devices(config: RunConfig) -> Check | None:
    """The parts that need a GPU, on a machine without one. None if there is a GPU, or nothing needs one.

    Not counted, because CPUs have them too: bfloat16, tensor parallelism, ``gpu_memory_utilization`` (of the host's
    memory in vLLM's CPU build), a broadcast's transport `nccl`, which falls back to gloo.
    """
    if has_gpu() or any(map(os.path.exists, GPU_DEVICES)):
        return None
    rollout, trainer = config.rollout, config.trainer
    graphs = rollout.vllm_args.get("enforce_eager", rollout.vllm_args.get("enforce-eager"))
    alone = {
        "trainer.engine=megatron": (trainer.engine == "megatron", "trainer.engine=fsdp"),
        "trainer.liger=true": (trainer.liger, "trainer.liger=false"),
        f"trainer.offload={str(trainer.offload).lower()}": (bool(trainer.offload), "trainer.offload=false"),
        "rollout.vllm_args.enforce_eager=false, which asks for CUDA graphs,": (
            rollout.engine == "vllm" and rollout.servers > 0 and graphs is False,
            "rollout.vllm_args.enforce_eager=true",
        ),
    }
    needing = {setting: instead for setting, (is_set, instead) in alone.items() if is_set}
    if not needing:
        return None
    verb = "needs" if len(needing) == 1 else "need"
    return Check(
        "gpus",
        False,
        f"no driver of a GPU on this machine, and {' and '.join(needing)} {verb} one",
        f"run it where a GPU and its driver are; or, to compute on CPUs, set {', '.join(needing.values())}",
    )


def check_size(config: RunConfig) -> Check | None:
    """A model that cannot fit, whatever else is spared: weights, gradients and moments alone, and of servers weights.

    `check_gpus` and `check_memory` count the rest, an estimate that refuses no run. None where sizes are unknown.
    """
    try:
        shape, _ = find_shape(config)
    except ConfigError:  # a config.json that cannot be read: `check_model` says so
        return None
    if shape is None:
        return None
    gpu_bytes = smallest_gpu_bytes()
    rank = rank_bytes(shape, config, on_gpu=gpu_bytes is not None)
    served = server_bytes(shape, config, 0)["weights"]
    if gpu_bytes is not None:
        return _on_devices(config, states_bytes(device_parts(rank, config.trainer)), served, gpu_bytes)
    ranks_here = config.trainer.ranks // trainer_nodes()
    needed, have = ranks_here * states_bytes(rank) + config.rollout.servers * served, memory_bytes()
    detail = f"{config.model}: trainer and servers keep {human(needed)} of it in this machine's memory of {human(have)}"
    return Check("model size", needed <= have, detail, "take a smaller model, trainer.lora.rank, fewer rollout.servers")


def _on_devices(config: RunConfig, states: float, served: float, gpu_bytes: int) -> Check:
    each = gpus_of_server(config.rollout)
    on_server = served / each if each and config.rollout.servers else 0.0
    parts = {"a trainer rank": states, "a rollout server": on_server}
    who, most = max(parts.items(), key=lambda part: part[1])
    detail = f"{config.model}: {who} keeps {human(most)} of it on a device of {human(gpu_bytes)}"
    more = "raise trainer.ranks" if config.trainer.parallel.replicate == 1 else "lower trainer.parallel.replicate"
    fix = f"{more}, or set trainer.offload=true or trainer.lora.rank"
    if who == "a rollout server":
        fix = "split the server over more GPUs (tensor_parallel_size, tp_size), or take a smaller model"
    return Check("model size", most <= gpu_bytes, detail, fix)


def check_apart(config: RunConfig, count: int) -> Iterator[Check]:
    """Under nccl: the ranks send from the first of `count` GPUs, and a server's first worker receives on its first."""
    if config.rollout.weight_transport != "nccl" or config.rollout.engine != "vllm":
        return
    servers = range(config.rollout.servers + config.rollout.evaluation_server)
    ranks = config.trainer.ranks
    shared = [number for number in servers if places_of_server(config, number, count)[0] < ranks]
    detail = "the ranks and the workers that receive have GPUs of their own"
    if shared:
        detail = f"rollout server {shared[0]} receives on a GPU that a rank sends from, and NCCL takes each GPU once"
    yield Check("rollout.weight_transport", not shared, detail, "set it to broadcast" if shared else "")


def check_driver(config: RunConfig) -> Check | None:
    """The driver, against what the torch of the trainer and of the engine need. None where nothing computes on GPUs."""
    if not has_gpu():
        return None
    try:
        driver, builds = driver_version(), _builds(config)
    except (OSError, subprocess.SubprocessError) as error:
        return skipped("driver", f"nvidia-smi, or an environment, cannot be asked: {error}")
    fix = newer_driver(driver, builds.values())
    listed = "".join(f"; {role} has {build}" for role, build in builds.items())
    return Check("driver", not fix, f"driver {driver}{listed}", fix)


def check_wire(config: RunConfig) -> Check | None:
    """Under nccl, whether both sides have one version of NCCL: else versions go over gloo, through host memory."""
    rollout = config.rollout
    if rollout.weight_transport != "nccl" or not (has_gpu() and rollout.servers and config.trainer.ranks):
        return None
    if rollout.engine != "vllm":
        detail = f"versions go over gloo, which is slower: {rollout.engine} receives over nothing else"
        return warning("nccl broadcast", detail, "set rollout.weight_transport=broadcast, or rollout.engine=vllm")
    try:
        builds = _builds(config)
    except (OSError, subprocess.SubprocessError) as error:
        return skipped("nccl broadcast", f"an environment cannot be asked: {error}")
    if "vllm" not in builds:  # `check_engine` reports it
        return None
    trainer, server = builds["trainer"], builds["vllm"]
    if trainer.nccl and trainer.nccl == server.nccl:
        return Check("nccl broadcast", True, f"NCCL {trainer.nccl} on both sides")
    detail = f"versions go over gloo, which is slower: the trainer has {trainer}, vllm has {server}"
    same = f"TORCH_VERSION={server.torch.partition('+')[0]} scripts/install-torch"
    return warning("nccl broadcast", detail, f"install the same torch for both: {same}")


def _builds(config: RunConfig) -> dict[str, TorchBuild]:
    """Return torch's builds by role. An engine whose environment cannot be used is left out: `check_engine` reports it.

    Raises `OSError`, `subprocess.SubprocessError`.
    """
    from penstock.rollout_server import EngineError, find_installation

    pythons = {"trainer": sys.executable} if config.trainer.ranks else {}
    if config.rollout.servers and config.rollout.engine in ("vllm", "sglang"):
        with contextlib.suppress(EngineError):
            pythons[config.rollout.engine] = asyncio.run(find_installation(config.rollout)).python
    return {role: build_of(python) for role, python in pythons.items()}


def check_gpus(config: RunConfig) -> Iterator[Check]:
    if not has_gpu():
        if check_devices(config) is None:  # else that check has refused the run
            yield skipped("gpus", "no NVIDIA driver on this machine: everything runs on CPUs")
        return
    if importlib.util.find_spec("torch") is None:
        yield skipped("gpus", "torch is not installed here")
        return
    import torch

    count = torch.cuda.device_count()
    if not count:
        fix = "install a torch that was built for this driver's CUDA, or give the container its devices (--gpus all)"
        yield Check("gpus", False, f"a driver is here, and torch {torch.__version__} sees no device", fix)
        return
    yield _enough(config, count, [torch.cuda.get_device_name(index) for index in range(count)])
    if config.trainer.ranks > 1:
        yield _together(torch, min(config.trainer.ranks, count))
    yield from check_apart(config, count)
    shape = model_shape(config)
    if shape is not None:
        smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        yield check_device("gpu memory", config, shape, Gpus(count, smallest))


def _enough(config: RunConfig, count: int, names: list[str]) -> Check:
    ranks, each = config.trainer.ranks, gpus_of_server(config.rollout)
    servers = config.rollout.servers
    detail = f"{count} ({', '.join(sorted(set(names)))}); {ranks} ranks, {servers} servers of {each}"
    if ranks > count or (servers and each > count):
        fix = f"set trainer.ranks to {count} or less, and each engine's tensor parallelism, or start parts elsewhere"
        return Check("gpus", False, detail, fix)
    if config.placement.colocated:
        return Check("gpus", True, f"{detail}, in turns with the trainer")
    if config.placement.lend:
        detail = f"{detail}, {lent_servers(config)} more in turns with the trainer"
    if ranks + servers * each > count:
        fix = "start servers on other machines, or let each engine take a part of its device (gpu_memory_utilization)"
        return warning("gpus", f"{detail}: trainer and engines share devices", fix)
    return Check("gpus", True, detail)


def _together(torch: Any, ranks: int) -> Check:
    if not torch.distributed.is_nccl_available():
        fix = "install a torch with NCCL: the ranks' collectives need it"
        return Check("nccl", False, "this torch has none", fix)
    apart = [pair for pair in permutations(range(ranks), 2) if not torch.cuda.can_device_access_peer(*pair)]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if apart:
        detail = f"NCCL {version}; {len(apart)} pairs of devices, such as {apart[0]}, do not reach each other's memory"
        return warning(
            "nccl", detail, "collectives go through the host there: choose devices under one switch or NVLink"
        )
    return Check("nccl", True, f"NCCL {version}; all {ranks} devices reach each other")
