"""Checks of packages and settings: are the required packages installed, and do the settings fit together?"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, refused, skipped, warning
from penstock.deploy.preflight.data import data_sources
from penstock.deploy.preflight.model import BadModelFiles, read_config
from penstock.deploy.preflight.routing import token_bytes
from penstock.deploy.run.connection import limits_of
from penstock.deploy.run.plan import has_gpu
from penstock.rollout_server import RolloutConfig

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of the drivers of NVIDIA, WSL and AMD."""
TRAINER = ("torch", "safetensors", "tensorboard", "matplotlib")


def check_sinks(config: RunConfig) -> Check:
    """Check what W&B needs: a sink that cannot start is left out of the run, and only the trainer's log says so."""
    name, left_out = "trainer.sinks", "and the run continues without it"
    ready = Check(name, True, ", ".join(["metrics.jsonl", *config.trainer.sinks]))
    if "wandb" not in config.trainer.sinks:
        return ready
    if importlib.util.find_spec("wandb") is None:
        return warning(name, f"wandb is not installed, {left_out}", "pip install 'penstock[wandb]'")
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return ready
    return warning(name, f"WANDB_API_KEY is not set, {left_out}", "set it, or WANDB_MODE=offline")


def check_engine(config: RunConfig) -> Check:
    if config.rollout.servers == 0:
        return Check("rollout.engine", True, "no server on this machine")
    if config.rollout.engine == "hf":
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        return Check(
            "rollout.engine", not missing, f"hf, missing {missing}" if missing else "hf", "pip install 'penstock[hf]'"
        )
    if config.rollout.engine == "served":
        # The engine itself asks the server, when it starts.
        url = config.rollout.url
        fix = "set rollout.url, or give `penstock eval` --url"
        return Check("rollout.engine", bool(url), f"served by {url or 'no server'}", fix)
    return asyncio.run(_check_stock_server(config.rollout))


def check_trainable(config: RunConfig) -> Check | None:
    """Only where the engine cannot be given new weights."""
    if rank := config.rollout.adapter_rank:  # an engine with places for adapters has other names for its layers
        problem = f"rollout.adapter_rank is {rank}: its servers take no new weights"
        return Check("weights", False, problem, "remove it: penstock serve sets it; trainer.lora needs none")
    if config.rollout.engine != "served":
        return None
    fix = "rollout.engine=hf, vllm or sglang; `penstock eval` takes a served model"
    return Check("weights", False, f"{config.rollout.url} serves its own weights: they cannot be trained", fix)


async def _check_stock_server(config: RolloutConfig) -> Check:
    """Asks the environment that the engine would use: is the server in it, and new enough?"""
    from penstock.rollout_server import EngineError, find_installation

    try:
        installation = await find_installation(config)
    except EngineError as error:
        return Check("rollout.engine", False, str(error), "install what it names, or set rollout.engine=hf on CPUs")
    name = f"{config.engine} {installation.version} in {installation.python}"
    if not installation.cpu and not any(map(os.path.exists, GPU_DEVICES)):
        fix = f"scripts/setup-{config.engine} makes the build for this machine; rollout.engine=hf computes on CPUs"
        return Check("rollout.engine", False, f"{name} is built for GPUs, and this machine has none", fix)
    return Check("rollout.engine", True, name)


def check_trainer(config: RunConfig) -> Check:
    missing = [name for name in TRAINER if not importlib.util.find_spec(name)]
    return Check(
        "trainer", not missing, f"missing {missing}" if missing else "torch found", "pip install 'penstock[train]'"
    )


def check_versions(_config: RunConfig) -> Check:
    """Every package that Penstock's core names, against the range that it is tested with."""
    from packaging.requirements import Requirement

    packages = ("torch", "transformers", "redis", "numpy")
    listed = ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)])
    try:
        own, needed = metadata.version("penstock"), metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return skipped("versions", f"{listed}; penstock runs from a folder, not installed: no ranges to compare")
    core = [one for one in map(Requirement, needed) if one.marker is None or one.marker.evaluate({"extra": ""})]
    unfit = [
        one
        for one in core
        if (version := _version(one.name)) == "missing" or not one.specifier.contains(version, prereleases=True)
    ]
    wrong = ", ".join(f"{one.name} {_version(one.name)} (wanted {one.specifier})" for one in unfit)
    fix = "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in unfit)
    return Check("versions", not unfit, wrong or f"penstock {own}, {listed}", fix)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def check_correction(config: RunConfig) -> Check:
    needed = config.max_staleness > 0 and config.trainer.correction is None
    return Check(
        "trainer.correction",
        not needed,
        f"{config.trainer.correction} at max_staleness {config.max_staleness}",
        "stale tokens need an off-policy correction: set trainer.correction=truncated_is, or max_staleness=0",
    )


def check_algorithm(config: RunConfig) -> Check | None:
    if importlib.util.find_spec("torch") is None:  # not a machine that trains
        return None
    from penstock.trainer import check_algorithm

    detail = f"{config.trainer.advantage}, {config.trainer.loss}, {config.group_size} episodes per task"
    try:
        check_algorithm(config.trainer, config.group_size)
    except ValueError as error:
        return Check("algorithm", False, str(error), "correct trainer.advantage, trainer.loss or their options")
    return Check("algorithm", True, detail)


def check_dtype(config: RunConfig) -> Check | None:
    """None where only the trainer's machine knows which type ``auto`` is; the trainer warns at its start."""
    trainer, on_gpu = config.trainer, has_gpu()
    if trainer.dtype == "auto" and not on_gpu:
        return None
    mismatch = trainer.dtype_mismatch(config.rollout.dtype, on_gpu=on_gpu)
    return warning("trainer.dtype", *mismatch) if mismatch else None


def check_training_engine(config: RunConfig) -> Check | None:
    if importlib.util.find_spec("torch") is None:
        return None
    from penstock.trainer.engines import check_engine

    trainer = config.trainer
    detail = f"{trainer.engine}, {trainer.ranks} ranks"
    try:
        check_engine(trainer)
        _check_split(config)
    except ValueError as error:
        return refused("trainer.engine", error, "correct trainer.engine, trainer.ranks or trainer.parallel")
    return Check("trainer.engine", True, detail)


def _check_split(config: RunConfig) -> None:
    """Check that the engine can split the model so: megatron its layers, heads, vocabulary and experts, fsdp its
    experts. Raises `BadJob`, a `ValueError`; faults in the model's files are left to `check_model`."""
    trainer = config.trainer
    if not Path(config.model).is_dir():
        return
    if trainer.engine == "fsdp" and trainer.parallel.expert > 1:
        from penstock.trainer.engines.fsdp import check_experts_of

        check_experts_of(config.model, trainer.parallel.expert)
    if trainer.engine != "megatron":
        return
    from penstock.trainer.engines.megatron import check_model

    try:
        declared = read_config(Path(config.model))
    except BadModelFiles:
        return
    check_model(SimpleNamespace(**declared), trainer.parallel, config.model)


PACKED = "rows of a pack do not see each other"


def check_packing(config: RunConfig) -> Check | None:
    """The engine itself is asked, in a separate process: it loads the model, or a small copy of it."""
    if importlib.util.find_spec("torch") is None or config.trainer.engine != "fsdp":
        return None
    from penstock.trainer.engines.fsdp import try_model

    name, trial = "packed training", try_model(config.model)
    if trial.refused:
        return Check(
            name, False, trial.refused, "choose another model: no setting of trainer.engine fsdp trains this one"
        )
    if trial.skipped:
        return skipped(name, f"the trainer tries it when it starts; here {trial.skipped}")
    how = f"rows are trained unpacked: {trial.unpacked_because}" if trial.unpacked_because else PACKED
    return Check(name, True, how + (", tried on a small copy" if trial.copied else ""))


def check_sampling(config: RunConfig) -> Check:
    agent = config.agent
    return Check(
        "rollout.truncated_sampling",
        config.rollout.truncated_sampling or (agent.top_p >= 1.0 and agent.top_k <= 0),
        f"top_p {agent.top_p:g}, top_k {agent.top_k}",
        "truncated sampling biases the policy gradient and is refused: leave agent.top_p at 1 and agent.top_k at -1,"
        " or set rollout.truncated_sampling=true",
    )


def check_capacity(config: RunConfig) -> Check:
    from penstock.transfer_queue import QueueError, check_limits, check_quotas, check_step_bytes

    limits = limits_of(config)
    try:
        check_limits(limits)
        largest = replace(limits, group_size=config.largest_group)
        check_step_bytes(largest, config.agent.most_response_tokens, token_bytes(config))
        check_quotas(limits, data_sources(config) if limits.quotas else [])
    except QueueError as error:
        return Check("transfer_queue", False, str(error), "correct group_size, groups_per_step or transfer_queue.*")
    return Check("transfer_queue", True, f"a step of {limits.groups_per_step} groups can be filled and held")


def check_concurrency(config: RunConfig) -> Check:
    """Compare the workers' places with the episodes in flight: slow episodes keep others from a place."""
    if not config.agent.workers:
        return skipped("agent.concurrency", "no agent worker on this machine")
    step = config.groups_per_step * config.group_size
    admitted = step * (config.max_staleness + 1)
    at_once = config.agent.workers * config.agent.concurrency
    places = f"{config.agent.workers} workers with agent.concurrency={config.agent.concurrency} each"
    in_flight = f"{admitted} in flight at max_staleness {config.max_staleness}"
    detail = f"{at_once} episodes at once ({places}), of {in_flight}"
    advice = f"agent.concurrency={math.ceil(admitted / config.agent.workers)} for each worker runs all of them"
    if at_once < step:
        return warning("agent.concurrency", f"{detail}; a step has {step}", f"{advice} at once")
    if at_once < admitted:
        return Check("agent.concurrency", True, f"{detail}; if tools or rewards take seconds, {advice} at once")
    return Check("agent.concurrency", True, detail)


def check_training_job(config: RunConfig) -> Check | None:
    """Return a failed check for settings that only the trainer itself refuses; None if there are none."""
    if importlib.util.find_spec("torch") is None:
        return None
    above = (check_correction(config), check_algorithm(config), check_training_engine(config))
    if not all(check is None or check.ok for check in above):
        return None
    from penstock.deploy.run.roles import train_job
    from penstock.testing import MemoryTransferQueue
    from penstock.trainer import check_job
    from penstock.transfer_queue import RunContext

    # The checks use neither queue nor token.
    run = RunContext(
        MemoryTransferQueue(), config.model, "made when it starts", teacher_top_k=config.agent.teacher_top_k
    )
    try:
        check_job(train_job(run, config, Path()))
    except ValueError as error:
        return Check("trainer settings", False, str(error), "correct the setting that it names")
    return Check("trainer settings", True, f"{config.trainer.steps} steps of {config.groups_per_step} groups")
