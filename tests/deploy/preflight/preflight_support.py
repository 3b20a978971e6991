"""The calculator's recipe with one thing wrong, and what its checks report."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy import load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.suite import FACTS, TRIALS, Asked

REPOSITORY = Path(__file__).parents[3]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"
MODEL = REPOSITORY / "recipes" / "calculator" / "model"


def failed(check: Asked, *overrides: str) -> dict[str, Check]:
    """Findings of one check that are not ok, by name."""
    assert check in (*FACTS, *TRIALS), "the doctor itself must ask it"
    found = check(load_config(RECIPE, list(overrides)))
    findings = [found] if isinstance(found, Check) else list(found or ())
    return {one.name: one for one in findings if not one.ok}


def assert_refused(check: Asked, overrides: list[str], fix: str) -> None:
    texts = [f"{name}: {one.found}; {one.fix}" for name, one in failed(check, *overrides).items()]
    assert any(re.search(fix, text) for text in texts), texts


@contextlib.contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[Path]:
    """A file system of this size; skips where this user may mount none."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk is a tmpfs, and mounting one needs root: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def write_huge_model(folder: Path, parameters: int) -> Path:
    """A model of so many parameters that takes no room: its file is a hole with a true header."""
    shutil.copytree(MODEL, folder)
    shape = [parameters // 4096, 4096]
    size = 4 * shape[0] * shape[1]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": tensor})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + size)
    return folder


def write_model(folder: Path, kind: str, **sizes: Any) -> str:
    """A folder with a model of these sizes and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(folder / kind)
    return str(folder / kind)
