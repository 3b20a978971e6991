"""Environments with other builds of torch than this machine's: folders that say what installed packages say."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE
from tests.deploy.preflight.preflight_support import REPOSITORY

from penstock.deploy import load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.machine import check_driver, check_wire
from penstock.deploy.preflight.suite import JOINING, TRIALS, Asked

SCRIPT = REPOSITORY / "deploy/preflight/torch_builds.py"
PLUGIN = "[vllm.general_plugins]\npenstock_weights = penstock:plugin\n"


def environment(folder: Path, *, torch: str, cuda: str, nccl: str) -> str:
    """Interpreter of an environment that has these packages' descriptions, and vLLM's."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise ImportError('it is asked without being imported')\n")
    (site / "torch/version.py").write_text(f"__version__ = {torch!r}\ncuda = {cuda!r} or None\n")
    packages = {"vllm": "0.32.0", "penstock": "1"} | ({f"nvidia-nccl-cu{cuda[:2]}": nccl} if nccl else {})
    for name, version in packages.items():
        described = site / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (described / "entry_points.txt").write_text(PLUGIN if name == "penstock" else "")
    return str(folder / "bin/python")


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with a driver of branch 575, whose trainer has torch for CUDA 12."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '575.57.08\\n575.57.08\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)
    python = environment(tmp_path / "trainer", torch="2.13.0+cu129", cuda="12.9", nccl="2.29.7")
    monkeypatch.setattr("sys.executable", python)
    return python


def check(asked: Asked, server: str, *words: str) -> Check:
    assert asked in TRIALS
    settings = ["rollout.engine=vllm", f"rollout.vllm_python={server}", "rollout.weight_transport=nccl", *words]
    found = asked(load_config(RECIPE, settings))
    assert isinstance(found, Check)
    return found


@pytest.mark.parametrize(
    ("torch", "cuda", "nccl", "driver", "wire"),
    [
        ("2.14.0+cu130", "13.0", "2.30.7", "FAIL", "warn"),
        ("2.14.0+cu129", "12.9", "2.30.7", "ok", "warn"),
        ("2.13.0+cu129", "12.9", "2.29.7", "ok", "ok"),
        ("2.13.0+cpu", "", "", "ok", "warn"),
    ],
)
def test_builds_of_both_sides_are_compared_with_the_driver_and_with_each_other(
    torch: str, cuda: str, nccl: str, driver: str, wire: str, trainer: str, tmp_path: Path
) -> None:
    server = environment(tmp_path / "server", torch=torch, cuda=cuda, nccl=nccl)
    found = check(check_driver, server)
    assert found.verdict == driver
    assert "driver 575.57.08; trainer has torch 2.13.0+cu129 (CUDA 12.9, NCCL 2.29.7)" in found.found
    assert ("driver 580 or newer" in found.fix) == (driver == "FAIL")
    found = check(check_wire, server)
    assert found.verdict == wire
    if wire == "warn":
        assert "the trainer has torch 2.13.0+cu129 (CUDA 12.9, NCCL 2.29.7)" in found.found
        assert f"vllm has torch {torch}" in found.found
        assert f"TORCH_VERSION={torch.partition('+')[0]}" in found.fix
    ended = subprocess.run([sys.executable, SCRIPT, trainer, server], capture_output=True, text=True, check=False)
    assert ended.returncode == (driver == "FAIL"), ended
    assert f"{server}: torch {torch}" in ended.stdout


@pytest.mark.usefixtures("trainer")
def test_an_engine_without_nccl_is_warned_of_and_one_that_cannot_be_used_is_left_to_its_own_check() -> None:
    assert "sglang receives over nothing else" in check(check_wire, "", "rollout.engine=sglang").found
    assert check(check_driver, "/no/python").found.endswith("NCCL 2.29.7)")
    asked = ["rollout.engine=vllm", "rollout.vllm_python=/no/python", "rollout.weight_transport=nccl"]
    assert check_wire(load_config(RECIPE, asked)) is None
    assert check_driver in JOINING


@pytest.mark.usefixtures("trainer")
def test_before_an_install_the_driver_is_that_of_the_wheels_to_come() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "driver 580 or newer" in ended.stderr
    assert "CUDA 13.0" in ended.stderr


def test_without_a_gpu_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path / "none")
    assert check_driver(load_config(RECIPE)) is None
    assert check_wire(load_config(RECIPE, ["rollout.weight_transport=nccl"])) is None
