"""Engines by name. Each is imported only when it is asked for: they need packages that others do without."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.server_process import Installation
from penstock.rollout_server.protocol import Engine

MakeEngine = Callable[[RolloutConfig, str, Path, int], Engine]
"""(config, model folder or hub name, folder for log files, seed) → an engine that is not started yet."""

ENGINES = {
    "hf": "penstock.rollout_server.engines.hf:HFEngine",
    "vllm": "penstock.rollout_server.engines.vllm:VLLMEngine",
    "sglang": "penstock.rollout_server.engines.sglang:SGLangEngine",
}
INSTALLED = {
    "vllm": "penstock.rollout_server.engines.vllm",
    "sglang": "penstock.rollout_server.engines.sglang_server",
}


def make_engine(config: RolloutConfig, model: str, log_dir: Path, seed: int) -> Engine:
    """The engine that `config.engine` names."""
    module, _, name = ENGINES[config.engine].partition(":")
    engine_class: MakeEngine = getattr(importlib.import_module(module), name)
    return engine_class(config, model, log_dir, seed)


async def find_installation(config: RolloutConfig) -> Installation:
    """Environment and version of an engine that has its own server (``vllm``, ``sglang``). Raises `EngineError`."""
    module = importlib.import_module(INSTALLED[config.engine])
    found: Installation = await module.find_installation(config)
    return found
