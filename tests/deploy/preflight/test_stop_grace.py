"""The grace of the last checkpoint: from the bytes of a checkpoint, and whatever surrounds the trainer waits longer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE

from penstock.deploy import RunConfig, RunConnection, load_config, roles_of
from penstock.deploy.placements.slurm.placement import place
from penstock.deploy.placements.slurm.script import SlurmJob, SlurmRecipe, run_script
from penstock.deploy.preflight.model_shape import shape_from_config
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


def trainer_grace_s(config: RunConfig) -> float:
    return roles_of(config, LINK)[-1].stop_grace_s


def script(config: RunConfig) -> str:
    recipe = SlurmRecipe(RECIPE, [], config)
    return run_script(recipe, SlurmJob(), place(config, 2, gpus_per_node=0), sandbox=False, max_requeues=5)


def test_a_small_model_has_the_usual_graces() -> None:
    config = with_stop_grace(configured())
    assert config.trainer.stop_grace_s == 25.0
    assert trainer_grace_s(config) == trainer_grace_s(configured()) == 40.0
    assert (head_grace_s(config, SLURM_S), head_grace_s(config, CONTAINER_S)) == (60, 90)
    assert "signal=B:TERM@60" in script(config)
    assert "--linger-s 25 " in script(config)


def test_a_large_model_has_time_for_its_bytes(large: str) -> None:
    config = configured(large, "trainer.ranks=8")
    shape = shape_from_config(json.loads(LARGE))
    assert shape is not None
    expected = math.ceil(15 + 12 * shape.parameters / 8 / 20e6)
    assert 500 < expected < 700
    resolved = with_stop_grace(config)
    assert resolved.trainer.stop_grace_s == expected
    assert with_stop_grace(resolved) is resolved
    assert trainer_grace_s(resolved) == expected + 15
    assert head_grace_s(config, CONTAINER_S) == expected + 65
    assert f"signal=B:TERM@{expected + 35}" in script(config)
    assert f"--linger-s {expected} " in script(config)
    of_adapter = with_stop_grace(configured(large, "trainer.ranks=8", "trainer.lora.rank=8")).trainer.stop_grace_s
    assert of_adapter == 25.0


def test_what_the_recipe_says_counts(large: str) -> None:
    config = configured(large, "trainer.stop_grace_s=300")
    assert with_stop_grace(config) is config
    assert trainer_grace_s(config) == 315.0
    assert "signal=B:TERM@335" in script(config)


def test_doctor_says_that_a_small_checkpoint_has_time(tmp_path: Path) -> None:
    (found,) = check_stop_grace(configured(f"runs_dir={tmp_path}"))
    assert found.ok
    assert not found.warns
    assert "25 s" in found.found


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
