"""Refuses settings that the engine cannot serve, or not on this machine, before anything is loaded."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.job import BadJob, needs_of_advantage

SETUP_HINT = "scripts/setup-megatron makes the environment; trainer.megatron.python may name another one"


def check(config: TrainerConfig) -> None:
    """Raises `BadJob`."""
    config = config.resolve_dtype(on_gpu=True)  # `check_machine` refuses CPUs
    if needs_of_advantage(config) & {"values", "implicit"}:
        raise BadJob(
            f"trainer.advantage={config.advantage} needs a critic, and trainer.engine megatron has none: take an "
            "estimator without one, or trainer.engine fsdp"
        )
    foreign = {
        "lora.rank": config.lora.rank,
        "compile": config.compile,
        "liger": config.liger,
        "offload": config.offload,
        "activation_offload": config.activation_offload,
        "parallel.replicate": config.parallel.replicate > 1,
        "kl.reference_dtype": config.kl.reference_dtype not in (None, config.dtype),
    }
    for name, is_set in foreign.items():
        if is_set:
            raise BadJob(
                f"trainer.{name} is of trainer.engine fsdp; trainer.engine megatron has no such thing: unset it"
            )
    if config.parallel.context > 1 and config.dtype != "bfloat16":
        raise BadJob(
            f"trainer.parallel.context is {config.parallel.context} and trainer.dtype {config.dtype}: packed rows are "
            "cut by Transformer Engine's attention, which takes trainer.dtype=bfloat16 alone"
        )
    per_stage = config.ranks // config.parallel.pipeline
    if per_stage % config.parallel.expert:
        raise BadJob(
            f"trainer.parallel.expert is {config.parallel.expert}, which does not divide the {per_stage} ranks of a "
            "pipeline stage"
        )


def check_machine(config: TrainerConfig) -> None:
    """Raises `BadJob` if this machine, or this Python environment, cannot run the engine as it is set."""
    missing = [name for name in ("megatron.core", "mbridge") if not _is_installed(name)]
    if missing:
        raise BadJob(f"trainer.engine megatron: {' and '.join(missing)} not installed in this Python; {SETUP_HINT}")
    require_gpu()
    if config.parallel.context > 1 and not takes_packed_rows(config):
        reason = (
            f"trainer.dtype is {config.dtype}" if has_transformer_engine() else "that is not installed in this Python"
        )
        raise BadJob(
            "trainer.parallel.context cuts packed rows, which only Transformer Engine's attention takes, in bfloat16 "
            f"on NVIDIA GPUs, and {reason}; {SETUP_HINT}"
        )


def require_gpu() -> None:
    """megatron-core asks CUDA for devices, streams and random states throughout. Raises `BadJob`."""
    import torch

    if not torch.cuda.is_available():
        raise BadJob(
            "trainer.engine megatron computes on NVIDIA GPUs, and torch sees none here; trainer.engine fsdp computes "
            "on CPUs too"
        )


def has_transformer_engine() -> bool:
    return _is_installed("transformer_engine")


def takes_packed_rows(config: TrainerConfig) -> bool:
    """Else rows are filled up to the longest of their pack."""
    return has_transformer_engine() and config.dtype == "bfloat16"


def find_python(configured: str | None) -> str:
    """The Python that the ranks run in: `configured`, else .venv-megatron in this folder or one above it, else this
    one. Raises `BadJob`."""
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise BadJob(f"trainer.megatron.python: {configured} cannot be run; {SETUP_HINT}")
        return configured
    here = Path.cwd()
    candidates = [folder / ".venv-megatron/bin/python" for folder in (here, *here.parents)]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), sys.executable)


def check_model(hf_config: Any, parallel: ParallelConfig, model: str) -> None:
    """Raises `BadJob` where the model cannot be split so, or would be computed in another way."""
    if getattr(hf_config, "model_type", "") == "qwen3_moe" and not getattr(hf_config, "norm_topk_prob", False):
        raise BadJob(
            f"{model} has norm_topk_prob false: the weights of a token's experts do not sum to 1, and mbridge builds "
            "Qwen3-MoE so that they do; trainer.engine fsdp computes what the model says"
        )
    # Model families call their number of experts by three names.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    divided = {
        "num_hidden_layers": parallel.pipeline,
        "num_attention_heads": parallel.tensor,
        "num_key_value_heads": parallel.tensor,
        "vocab_size": parallel.tensor,
        next((name for name in names if hasattr(hf_config, name)), names[0]): parallel.expert,
    }
    for name, by in divided.items():
        size = getattr(hf_config, name, None)
        if by > 1 and (size is None or size % by):
            setting = "pipeline" if name == "num_hidden_layers" else "expert" if "experts" in name else "tensor"
            raise BadJob(f"{model} has {name} {size}, which trainer.parallel.{setting} {by} does not divide")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
