"""Run by the Python of vLLM's CPU build: in_vllm.py FOLDER … prints a line of JSON for each, {"folder", "found"}.

vLLM's own loader makes the model and reads the folder's tensors by its own names; a tensor that it does not know, and a
parameter that it does not find, is an error. No server is started.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry

torch.accelerator.empty_cache = lambda: None  # the CPU build has no accelerator to empty, and its loader asks one
registry._run_in_subprocess = lambda inspect: inspect()  # a process per family, to keep CUDA out, costs most


def main(folders: list[str]) -> None:
    torch.set_num_threads(1)
    # One with experts first: vLLM's groups are made once, and then there is one for them.
    for number, folder in enumerate(sorted(folders, key=_has_experts, reverse=True)):
        print(json.dumps({"folder": folder, "found": _found(folder, first=number == 0)}), flush=True)


def _has_experts(folder: str) -> bool:
    return "num_experts_per_tok" in (Path(folder) / "config.json").read_text()


def _found(folder: str, *, first: bool) -> str:
    try:
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128
        ).create_engine_config()
        with set_current_vllm_config(config):
            if first:
                _open_groups()
            model = get_model(vllm_config=config)
    except Exception as error:  # noqa: BLE001 - whatever it says is what the table says
        said = _sentence(error)
        if "failed to be inspected" in said and find_spec("torchvision") is None:
            return "not tried: vLLM's module of it imports torchvision, which is not installed"
        return f"refused: {said}"
    return "loads" if _is_own(model) else "loads, as transformers' model"


def _open_groups() -> None:
    rendezvous = Path(tempfile.mkdtemp()) / "store"
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
    initialize_model_parallel()


def _is_own(model: Any) -> bool:
    return not type(model).__name__.startswith("Transformers")


def _sentence(error: Exception) -> str:
    """The last line that says something, without what pydantic puts around it."""
    text = str(error).split(" [type=")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].removeprefix("Value error, ").split(". ")[0].rstrip(".")


if __name__ == "__main__":
    main(sys.argv[1:])
