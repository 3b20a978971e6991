"""Runs of the engine megatron in processes of their own: layouts, models, and what came out."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from tests.tiny_model import save_tiny_model
from trainer_support import ENVIRONMENT

from penstock.trainer.engines.megatron import find_python
from penstock.trainer.engines.megatron.settings import SETUP_HINT

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
PYTHON = os.environ.get("PENSTOCK_MEGATRON_PYTHON") or find_python(None)
FIND = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('megatron', 'mbridge', 'torch'))))"
INSTALLED = not subprocess.run([PYTHON, "-c", FIND], capture_output=True, check=False).returncode
ON_CPU = [
    pytest.mark.deep,
    pytest.mark.megatron,
    pytest.mark.skipif(not INSTALLED, reason=f"no megatron-core and mbridge in {PYTHON}: {SETUP_HINT}"),
    pytest.mark.skipif(
        which("nvidia-smi") is not None, reason="its CPU tests run where Transformer Engine is not there"
    ),
]
"""Marks of tests that run on gloo."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"ranks": 1},
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "parallel": {"tensor": 2}},
    "pp2": {"ranks": 2, "parallel": {"pipeline": 2}},
    "cp2": {"ranks": 2, "parallel": {"context": 2}},
    "ep2": {"ranks": 2, "parallel": {"expert": 2}},
    "cp2 ep2": {"ranks": 2, "parallel": {"context": 2, "expert": 2}},
    "pp2 ep2": {"ranks": 4, "parallel": {"pipeline": 2, "expert": 2}},
    "tp2 ep2": {"ranks": 2, "parallel": {"tensor": 2, "expert": 2}},
    "tp2 pp2 ep2": {"ranks": 4, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2}},
    "tp2 pp2": {"ranks": 4, "parallel": {"tensor": 2, "pipeline": 2}},
    "tp2 cp2": {"ranks": 4, "parallel": {"tensor": 2, "context": 2}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One of the functions of rank.py, and what it is given."""

    case: str
    folder: Path
    model: str
    layout: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(LAYOUTS[self.layout]["ranks"])

    def as_json(self) -> dict[str, Any]:
        settings = {"engine": "megatron", **LAYOUTS[self.layout], **self.settings}
        return {**asdict(self), "folder": str(self.folder), "ranks": self.ranks, "settings": settings}


def on_ranks(folder: Path, cases: Sequence[Case], *, cpu: bool = True) -> None:
    """All cases. On GPUs by torchrun, and then of layouts of as many ranks; CUDA must not be forked."""
    for case in cases:
        case.folder.mkdir(parents=True, exist_ok=True)
    given = folder / "cases.json"
    given.write_text(json.dumps([case.as_json() for case in cases]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cases[0].ranks}"]
    environment = {**ENVIRONMENT, **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})}
    done = subprocess.run(
        [PYTHON, *([] if cpu else torchrun), str(HERE / "rank.py"), str(given)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    failed = sorted(folder.glob("failed_*"), key=lambda path: path.stat().st_mtime_ns)
    assert done.returncode == 0, failed[0].read_text() if failed else done.stderr[-6000:]


def with_distinct_norms(folder: Path, kind: str, **changes: Any) -> str:
    """A tiny model whose norms differ, so that none can take another's place unseen."""
    import torch
    from safetensors.torch import load_file, save_file

    model = save_tiny_model(folder, kind, tokenizer=True, **changes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    norms = {
        name: 1 + 0.2 * torch.randn(one.shape, generator=generator) for name, one in tensors.items() if "norm" in name
    }
    save_file({**tensors, **norms}, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
