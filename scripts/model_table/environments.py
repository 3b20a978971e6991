"""The cells that other environments tell: vLLM's CPU build, SGLang, megatron-core.

Each is a program of this folder, run once by that environment's Python for all tiny models.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS: Mapping[str, str] = {"vllm": ".venv-vllm", "sglang": ".venv-sglang", "megatron": ".venv-megatron"}
"""Column → environment; its program is in_COLUMN.py."""
NOT_TRIED = "not tried: "
"""A found text that begins so says what the environment lacks."""
TIMEOUT_S = 560.0


class Unavailable(RuntimeError):
    """The environment is not here, or its program ended by itself; the message says which."""


def try_in_environment(column: str, models: Path, families: Sequence[str]) -> dict[str, str]:
    """Try the families in the environment of `column`. Returns cells by the family's name, without untried families.

    `models`: the folder that `try_families` filled. Raises `Unavailable`.
    """
    python = ROOT / ENVIRONMENTS[column] / "bin/python"
    if not python.exists():
        raise Unavailable(f"no {ENVIRONMENTS[column]}: scripts/setup --{column} or scripts/setup-{column} makes it")
    published = column != "megatron"  # that one reads what it was given, and is compared with it
    folders = {str(models / name / "published" if published else models / name): name for name in families}
    done = subprocess.run(
        [str(python), str(HERE / f"in_{column}.py"), *folders],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"folder"')]
    if done.returncode or len(lines) != len(folders):
        raise Unavailable(f"in_{column}.py ended with exit status {done.returncode}: {done.stderr[-2000:]}")
    return {folders[line["folder"]]: line["found"] for line in lines if not line["found"].startswith(NOT_TRIED)}
