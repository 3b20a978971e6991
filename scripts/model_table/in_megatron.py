"""Run by the Python of megatron-core: in_megatron.py FOLDER … prints a line of JSON for each, {"folder", "found"}.

The engine megatron opens the model on one rank, scores a pack, and gives the weights back. Without a GPU the tests'
shim answers for CUDA; layers are then megatron-core's own, without Transformer Engine.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "tests/trainer/engines/megatron")


def main(folders: list[str]) -> None:
    sys.path[:0] = map(str, PATHS)
    if not torch.cuda.is_available():
        import_module("cpu_shim")  # before anything of megatron
    from penstock.trainer import Ranks

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks = Ranks.open(60)
    try:
        for folder in folders:
            print(json.dumps({"folder": folder, "found": _found(folder, ranks)}), flush=True)
    finally:
        ranks.close()


def _found(folder: str, ranks: Any) -> str:
    from penstock.trainer import BadJob, TrainerConfig
    from penstock.trainer.engines.megatron.engine import MegatronEngine

    try:
        engine = MegatronEngine(folder, TrainerConfig(engine="megatron"), ranks)
    except BadJob as error:
        why = str(error).replace(folder, "the model").split("; ")[0]
        return "refused: " + re.sub(r"the model is of type \w+, which (mbridge does not convert)", r"\1 its type", why)
    return _compared(engine, folder)


def _compared(engine: Any, folder: str) -> str:
    from safetensors.torch import load_file
    from scripts.model_table.trying import SAME, tiny_rows

    from penstock.trainer.engines.fsdp import load_policy
    from penstock.trainer.packing import join_rows

    pack = join_rows(tiny_rows())
    (found,) = engine.score([pack])
    with torch.no_grad():
        gap = float((found - load_policy(folder, 1.0)(pack).logprobs).abs().max())
    if not gap <= SAME:
        return f"WRONG: logprobs differ by {gap:.0e}"
    stored, given = load_file(Path(folder) / "model.safetensors"), dict(engine.weights(torch.float32))
    if stored.keys() != given.keys() or any(not torch.equal(stored[name], given[name]) for name in stored):
        return "WRONG: the weights that it gives back differ from those that it read"
    return "trains"


if __name__ == "__main__":
    main(sys.argv[1:])
