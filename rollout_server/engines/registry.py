"""Engines by name. Each is imported only when it is asked for: they need packages that others do without."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.protocol import Engine

MakeEngine = Callable[[RolloutConfig, str, Path, int], Engine]
"""(config, model folder or hub name, folder for log files, seed) → an engine that is not started yet."""

ENGINES = {
    "hf": "penstock.rollout_server.engines.hf:HFEngine",
    "vllm": "penstock.rollout_server.engines.vllm:VLLMEngine",
    "sglang": "penstock.rollout_server.engines.sglang:SGLangEngine",
}


def make_engine(config: RolloutConfig, model: str, log_dir: Path, seed: int) -> Engine:
    """The engine that `config.engine` names."""
    module, _, name = ENGINES[config.engine].partition(":")
    engine_class: MakeEngine = getattr(importlib.import_module(module), name)
    return engine_class(config, model, log_dir, seed)
