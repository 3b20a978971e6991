"""Engines by name. Each is imported only when a server starts it: they need packages that others do without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.common import Registry
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.http.server_process import Installation
from penstock.rollout_server.protocol import Engine

MakeEngine = Callable[[RolloutConfig, str, Path, int], Engine]
"""(config, model folder or hub name, folder for log files, seed) → an engine that is not started yet."""
FindInstallation = Callable[[RolloutConfig], Awaitable[Installation]]

ENGINES: Registry[MakeEngine] = Registry(
    "engine",
    {
        "hf": "penstock.rollout_server.engines.hf.engine:HFEngine",
        "vllm": "penstock.rollout_server.engines.vllm.engine:VLLMEngine",
        "sglang": "penstock.rollout_server.engines.sglang.engine:SGLangEngine",
        "served": "penstock.rollout_server.engines.http.served:ServedEngine",
    },
)
INSTALLATIONS: Registry[FindInstallation] = Registry(
    "engine with a Python environment",
    {
        "vllm": "penstock.rollout_server.engines.vllm.server:find_installation",
        "sglang": "penstock.rollout_server.engines.sglang.server:find_installation",
    },
)


def make_engine(config: RolloutConfig, model: str, log_dir: Path, seed: int) -> Engine:
    """The engine that `config.engine` names, not started yet."""
    return ENGINES.get(config.engine)(config, model, log_dir, seed)


async def find_installation(config: RolloutConfig) -> Installation:
    """Environment and version of an engine that has its own server (``vllm``, ``sglang``). Raises `EngineError`."""
    return await INSTALLATIONS.get(config.engine)(config)
