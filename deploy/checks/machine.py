"""Whether this machine can run it: programs, packages, boxes, memory and ports."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

from penstock.deploy.checks.boxes import try_sandbox
from penstock.deploy.checks.check import Check
from penstock.deploy.checks.sources import rewards_of
from penstock.deploy.config import RunConfig
from penstock.deploy.roles import SHARED_MEMORY
from penstock.rollout_server.config import RolloutConfig


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


def check_sandbox(config: RunConfig) -> Check | None:
    if not config.tools and "code" not in rewards_of(config):
        return None
    from penstock.sandbox.protocol import SandboxError

    try:
        try_sandbox(config)
    except SandboxError as error:
        return Check("sandbox", False, config.sandbox.backend, str(error))
    return Check("sandbox", True, config.sandbox.backend)
