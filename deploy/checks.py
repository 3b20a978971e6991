"""What must hold before a run costs anything: `penstock doctor` prints it, `penstock run` refuses on a failure."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.data.generate import PREFIX
from penstock.deploy.roles import SHARED_MEMORY
from penstock.rollout_server.config import RolloutConfig


@dataclass(frozen=True)
class Check:
    """One finding. `mend` says what to do where it is not ok."""

    name: str
    ok: bool
    found: str
    mend: str = ""


def run_checks(config: RunConfig) -> Iterator[Check]:
    """All checks, cheapest first, one at a time so that a person sees them come."""
    for check in CHECKS:
        found = check(config)
        if found is not None:
            yield found


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
    from penstock.trainer.algorithm import check_algorithm

    found = f"{config.trainer.advantage}, {config.trainer.loss}, {config.group_size} episodes per task"
    try:
        check_algorithm(config.trainer, config.group_size)
    except ValueError as error:
        return Check("trainer.advantage", False, found, str(error))
    return Check("trainer.advantage", True, found)


def check_lengths(config: RunConfig) -> Check:
    room = config.rollout.max_model_len - config.agent.max_response_tokens
    return Check(
        "rollout.max_model_len",
        room > 0,
        f"{config.rollout.max_model_len}, responses up to {config.agent.max_response_tokens}: {room} left for prompts",
        "a prompt and its response must fit: raise rollout.max_model_len or lower agent.max_response_tokens",
    )


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
    from penstock.deploy.link import limits_of
    from penstock.transfer_queue.capacity import check_quotas, check_step_bytes
    from penstock.transfer_queue.ledger import LedgerError
    from penstock.transfer_queue.rows import check_limits

    limits = limits_of(config)
    try:
        check_limits(limits)
        check_step_bytes(limits, config.agent.max_response_tokens)
        check_quotas(limits, _sources(config) if limits.quotas else [])
    except LedgerError as error:
        return Check("transfer_queue", False, "no step could be filled or held", str(error))
    return Check("transfer_queue", True, f"a step of {limits.groups_per_step} groups can be filled and held")


def _sources(config: RunConfig) -> set[str]:
    """Every data_source of the training data; none where it is generated for the run, or is no dataset."""
    from penstock.trainer.data import DataError, load_rows

    if config.data.train.startswith(PREFIX):
        return set()
    try:
        return {row.data_source for row in load_rows(config.data.train)}
    except DataError:
        return set()  # `check_data` says so


def check_redis(config: RunConfig) -> Check:
    from penstock.transfer_queue.ledger import LedgerError
    from penstock.transfer_queue.redis_binary import find_redis_server

    if config.transfer_queue.url:
        return Check("redis", True, f"the one at {config.transfer_queue.url}")
    try:
        found = find_redis_server()
    except LedgerError as error:
        return Check("redis-server", False, "not usable", str(error))
    return Check("redis-server", True, found.path)


def check_engine(config: RunConfig) -> Check:
    if config.rollout.servers == 0:
        return Check("rollout.engine", True, "no server on this machine")
    if config.rollout.engine == "hf":
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        return Check(
            "rollout.engine", not missing, f"hf, missing {missing}" if missing else "hf", "pip install 'penstock[hf]'"
        )
    return asyncio.run(_check_stock_server(config.rollout))


async def _check_stock_server(config: RolloutConfig) -> Check:
    """Asks the environment that the engine would use: is the server in it, and new enough?"""
    from penstock.rollout_server.engines import sglang_server, vllm_server
    from penstock.rollout_server.protocol import EngineError

    try:
        if config.engine == "vllm":
            found: Any = await vllm_server.find_installation(config)
        else:
            found = await sglang_server.find_installation(config)
    except EngineError as error:
        return Check("rollout.engine", False, config.engine, str(error))
    return Check("rollout.engine", True, f"{config.engine} {found.version} in {found.python}")


def check_trainer(config: RunConfig) -> Check:
    missing = [
        name for name in ("torch", "safetensors", "tensorboard", "matplotlib") if not importlib.util.find_spec(name)
    ]
    return Check(
        "trainer", not missing, f"missing {missing}" if missing else "torch found", "pip install 'penstock[train]'"
    )


def check_model(config: RunConfig) -> Check:
    folder = Path(config.model)
    if not folder.is_dir():
        hub_name = config.model.count("/") == 1 and not config.model.startswith((".", "/"))
        mend = "give a folder with config.json, tokenizer and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"
        return Check(
            "model", hub_name, f"{config.model} (no such folder{'; taken as a hub name' if hub_name else ''})", mend
        )
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    return Check("model", not missing, f"{folder}{' lacks ' + ', '.join(missing) if missing else ''}",
                 "save the model and its tokenizer with save_pretrained into this folder")  # fmt: skip


def check_template(config: RunConfig) -> Check | None:
    """The chat template takes tools and can be spliced token for token."""
    if not Path(config.model).is_dir():
        return None
    from penstock.agent_loops.chat import TemplateError, chat_of
    from penstock.sandbox.make import make_sandbox
    from penstock.sandbox.protocol import SandboxError
    from penstock.tools.registry import make_tools

    try:
        sandbox = make_sandbox(config.sandbox, owner="doctor") if config.tools else None
        schemas = [tool.schema for tool in make_tools(config.tools, sandbox).values()]
        chat_of(config.model, config.agent).prove(schemas)
    except (TemplateError, SandboxError, OSError, ValueError) as error:
        return Check("chat template", False, config.model, str(error))
    return Check("chat template", True, "splices exactly")


def check_data(config: RunConfig) -> Check:
    from penstock.trainer.data import DataError, load_rows

    counts = []
    for spec in (config.data.train, config.data.eval):
        if spec is None or spec.startswith(PREFIX):
            continue
        try:
            counts.append(f"{len(load_rows(spec))} rows in {spec}")
        except DataError as error:
            return Check("data", False, spec, str(error))
    return Check("data", True, "; ".join(counts) or "generated for the run")


def check_reward(config: RunConfig) -> Check | None:
    """Rewards in the box and their settings, and under by_data_source whether every row has one."""
    from penstock.agent_loops.errors import LoadError
    from penstock.agent_loops.reward import BY_SOURCE, check_reward
    from penstock.agent_loops.rewards.names import REWARDS

    if config.agent.reward not in (*REWARDS, BY_SOURCE):
        return None  # a function of the user's: loaded by the workers alone
    try:
        check_reward(config.agent, _sources(config))
    except LoadError as error:
        return Check("agent.reward", False, config.agent.reward, str(error))
    return Check("agent.reward", True, config.agent.reward)


def check_sandbox(config: RunConfig) -> Check | None:
    if not config.tools and config.agent.reward != "code":
        return None
    from penstock.sandbox.make import make_sandbox
    from penstock.sandbox.protocol import SandboxError

    try:
        make_sandbox(config.sandbox, owner="doctor")
    except SandboxError as error:
        return Check("sandbox", False, config.sandbox.backend, str(error))
    return Check("sandbox", True, config.sandbox.backend)


def check_shared_memory(config: RunConfig) -> Check | None:
    """Three copies of the weights at once: the version that is read, the one that is written, and one in between."""
    folder = Path(config.model)
    if config.rollout.weight_transport == "disk" or not folder.is_dir():
        return None
    needed = 3 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Check(
        "shared memory",
        free > needed,
        f"{needed >> 20} MiB of {free >> 20} MiB free in {SHARED_MEMORY}",
        "free some, give the container more (--shm-size), or set rollout.weight_transport=disk",
    )


def check_ports(config: RunConfig) -> Check | None:
    if config.rollout.port == 0:
        return None
    for port in range(config.rollout.port, config.rollout.port + config.rollout.servers):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.rollout.host, port))
            except OSError as error:
                mend = "stop what listens there, or set rollout.port=0 to take free ports"
                return Check("rollout.port", False, f"{config.rollout.host}:{port}: {error.strerror}", mend)
    return Check("rollout.port", True, f"{config.rollout.port} and up are free")


CHECKS: tuple[Callable[[RunConfig], Check | None], ...] = (
    check_correction,
    check_algorithm,
    check_lengths,
    check_sampling,
    check_capacity,
    check_ports,
    check_redis,
    check_engine,
    check_trainer,
    check_model,
    check_shared_memory,
    check_reward,
    check_sandbox,
    check_data,
    check_template,
)
