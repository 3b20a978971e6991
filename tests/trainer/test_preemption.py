"""A trainer that is told to stop gives up the step under way on all ranks, or finishes it on all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from stopped_ranks import AT, TOLD
from trainer_support import task_name

from penstock.trainer import Preemption, StepGivenUp

pytestmark = pytest.mark.torch
STEPS = 6
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_step_is_given_up_only_before_weights_change(ranks: Any) -> None:
    told = False
    preemption = ranks.own(Preemption)
    preemption.begin_step()
    told = True
    preemption.check()  # nobody listens
    preemption.listen(lambda: told)
    preemption.check()  # no step is under way
    preemption.begin_step()
    random = torch.rand(3)
    with pytest.raises(StepGivenUp):
        preemption.check()
    assert torch.equal(torch.rand(3), random), "the generator is as before the step"
    preemption.check()
    preemption.begin_step()
    preemption.weights_change()
    preemption.check()


@pytest.mark.deep
def test_one_of_two_ranks_is_told_in_the_middle_of_a_step_and_both_give_it_up(tmp_path: Path, tiny_model: str) -> None:
    program = Path(__file__).parent / "stopped_ranks.py"
    command = [sys.executable, str(program), str(tmp_path), tiny_model]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads((tmp_path / f"said_{rank}").read_text()) for rank in range(2)]
    assert said[TOLD]["first"] == "cancelled"
    assert [one["packs"] for one in said] == [2, 2], "no pack was trained after the one in which it was told"
    assert said[0]["stopped"] == [AT, AT], "version and committed step of the step before"
    assert (tmp_path / "stopped" / "run" / "checkpoints" / f"step_{AT:08d}").exists()
    assert (said[0]["second"], said[0]["done"]) == ("returned", [STEPS, STEPS])
    lines = [json.loads(line) for line in (tmp_path / "stopped" / "run" / "steps.jsonl").read_text().splitlines()]
    assert sorted(e for line in lines for e in line["episodes"]) == sorted(
        f"{task_name(n)}#{member}" for n in range(2 * STEPS) for member in range(4)
    )
    undisturbed, stopped = (
        load_file(tmp_path / name / "run" / "final_model" / "model.safetensors") for name in ("undisturbed", "stopped")
    )
    assert all(torch.equal(stopped[name], tensor) for name, tensor in undisturbed.items())
