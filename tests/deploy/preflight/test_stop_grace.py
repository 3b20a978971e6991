"""The grace of the last checkpoint: from the bytes of a checkpoint, and whatever surrounds the trainer waits longer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE

from penstock.deploy import RunConfig, RunConnection, load_config, roles_of
from penstock.deploy.placements.slurm.placement import place
from penstock.deploy.placements.slurm.script import SlurmJob, SlurmRecipe, run_script
from penstock.deploy.preflight.stop_grace import (
    CONTAINER_S,
    GRACE_VARIABLE,
    SLURM_S,
    check_stop_grace,
    head_grace_s,
    with_stop_grace,
)

LINK = RunConnection("redis://127.0.0.1:1", "mine", None, "a token")
LARGE = (
    '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,'
    ' "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,'
    ' "tie_word_embeddings": false}'
)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(GRACE_VARIABLE, raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def configured(*overrides: str) -> RunConfig:
    return load_config(RECIPE, list(overrides))


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A 7B of which only the config is here."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(LARGE)
    return f"model={tmp_path / 'large'}"


S = math.ceil(15 + 12 * 7_615_283_200 / 8 / 20e6)
"""Of a rank's eighth of the checkpoint, at the slowest rate that a save may have."""


@pytest.mark.parametrize(
    ("is_large", "overrides", "grace_s"),
    [
        (False, [], 25),
        (True, ["trainer.ranks=8"], S),
        (True, ["trainer.ranks=8", "trainer.lora.rank=8"], 25),
        (True, ["trainer.stop_grace_s=300"], 300),
    ],
)
def test_whatever_surrounds_the_trainer_waits_longer(
    large: str, is_large: bool, overrides: list[str], grace_s: int
) -> None:
    config = configured(*([large] if is_large else []), *overrides)
    resolved = with_stop_grace(config)
    assert resolved.trainer.stop_grace_s == pytest.approx(grace_s, abs=1)
    assert (resolved is config) == ("trainer.stop_grace_s=300" in overrides)
    own_s = resolved.trainer.stop_grace_s
    assert with_stop_grace(resolved) is resolved
    assert roles_of(resolved, LINK)[-1].stop_grace_s == own_s + 15
    assert (head_grace_s(config, SLURM_S), head_grace_s(config, CONTAINER_S)) == (own_s + 35, own_s + 65)
    recipe = SlurmRecipe(RECIPE, [], config)
    layout = place(config, 2, gpus_per_node=0)
    text = run_script(recipe, SlurmJob(), layout, sandbox=False, max_requeues=5)
    assert f"signal=B:TERM@{own_s + 35:.0f}" in text
    assert f"--linger-s {own_s:.0f} " in text


def test_doctor_says_that_a_small_checkpoint_has_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.stop_grace.measure", lambda _folder: (1e9, 0.001))
    (found,) = check_stop_grace(configured(f"runs_dir={tmp_path}"))
    assert found.ok
    assert not found.warns
    assert "25 s" in found.found
    assert "after SIGTERM takes about 15 s (15 s for the step under way" in found.found


@pytest.mark.parametrize("which", ["recipe", "container", "slurm"])
def test_doctor_warns_of_a_grace_in_which_nothing_is_saved(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"runs_dir={tmp_path}"]
    if which == "recipe":
        overrides.append("trainer.stop_grace_s=1")
    elif which == "container":
        monkeypatch.setenv(GRACE_VARIABLE, "70")
    else:
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.write_text('#!/bin/sh\necho "KeepAliveTime = 1"\necho "KillWait                = 3 sec"\n')
        scontrol.chmod(0o755)
    (found,) = check_stop_grace(configured(*overrides))
    assert found.ok
    assert found.warns
    named, fix = {
        "recipe": ("trainer.stop_grace_s is 1", "trainer.stop_grace_s"),
        "container": ("70 s after SIGTERM", "head.stopSeconds"),
        "slurm": ("KillWait is 3 s", "KillWait"),
    }[which]
    assert named in found.found
    assert fix in found.fix
