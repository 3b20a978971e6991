from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE

from penstock.deploy import load_config
from penstock.deploy.placements.slurm.placement import place
from penstock.deploy.placements.slurm.script import SlurmJob, SlurmRecipe, run_script


@pytest.fixture
def script_of(tmp_path: Path) -> Callable[..., str]:
    """The run's script for the calculator recipe with these overrides, job and nodes."""

    def make(*overrides: str, nodes: int = 2, job: SlurmJob = SlurmJob(), sandbox: bool = False, **where: Any) -> str:
        words = ["name=sums", f"runs_dir={tmp_path / 'runs'}", *overrides]
        config = load_config(RECIPE, words)
        at = place(config, nodes, gpus_per_node=job.gpus_per_node, **where)
        return run_script(SlurmRecipe(RECIPE, words, config), job, at, sandbox=sandbox, max_requeues=5)

    return make
