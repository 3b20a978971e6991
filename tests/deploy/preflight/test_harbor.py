"""Recipes with Harbor's tasks: what is wrong with a folder or its boxes has a fix of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE, assert_refused, failed
from tests.sandbox.harbor.conftest import WriteTask, write_task

from penstock.deploy import load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.data import check_data
from penstock.deploy.preflight.sandbox import check_harbor_tasks, check_sandbox

__all__ = ["write_task"]
pytestmark = pytest.mark.bwrap
TOOLS = ["tools=[{name: harbor}]", "sandbox.own_root=true"]


def test_a_folder_that_cannot_be_used_says_what_to_do(
    write_task: WriteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task("broken", files={"tests/test.sh": ""})
    assert_refused(check_data, ["data.train=harbor:tasks"], r"test\.sh is missing.*complete or correct the task")
    assert_refused(check_data, ["data.train=harbor:taks"], rf"{tmp_path}/taks: .*'tasks'.*recipe's folder")
    assert_refused(check_data, ["data.train=tasks"], rf"tasks of Harbor.*set data\.train=harbor:{tmp_path}/tasks$")


def test_tasks_are_counted_and_keys_that_nobody_reads_are_a_warning(write_task: WriteTask) -> None:
    folder = write_task("one").parent
    config = load_config(RECIPE, [f"data.train=harbor:{folder}", "data.eval=null"])
    assert check_data(config) == Check("data", True, f"1 task in {folder}")
    write_task("one", toml="[environment]\nmemory_gb = 64\ncpu = 1\n")
    check = check_data(config)
    assert (check.verdict, "task one: task.toml: environment.memory_gb is not a key" in check.found) == ("warn", True)
    assert check.found.endswith("environment.cpu is not a key of Harbor and is ignored; did you mean 'cpus'?")


def test_a_folder_for_boxes_that_is_not_there_is_not_a_missing_package(tmp_path: Path) -> None:
    words = [*TOOLS, f"sandbox.folders={{/agents: {tmp_path}/nope}}"]
    assert_refused(check_sandbox, words, r"nope is not a folder.*make that folder, or correct sandbox\.folders")


def test_tasks_that_need_larger_boxes_are_named_once_per_setting(write_task: WriteTask) -> None:
    for name, size in (("a", 512), ("b", 1025), ("c", 256), ("d", 256)):
        write_task(name, toml=f"[environment]\nmemory_mb = {size}\n{'cpus = 2' * (name == 'd')}\n")
    words = [f"data.train=harbor:{write_task('e').parent}", *TOOLS]
    refusal = failed(check_harbor_tasks, *words, "sandbox.memory_mb=256")["tasks' boxes"]
    assert refusal.found == (
        "3 of 5 tasks cannot have their box: task.toml of a and 1 other asks for environment.memory_mb up to 1025;"
        " sandbox.memory_mb is 256; task.toml of d asks for environment.cpus 2; sandbox.cpus is 1"
    )
    assert refusal.fix == "set sandbox.memory_mb=1025 and set sandbox.cpus=2, or leave these tasks out"
    assert failed(check_harbor_tasks, *words, "sandbox.memory_mb=1025", "sandbox.cpus=2") == {}


def test_all_settings_that_are_too_small_are_named_at_once(write_task: WriteTask) -> None:
    write_task("a", toml="[environment]\ncpus = 2\n")
    folder = write_task("b", toml="[environment]\ncpus = 64\nmemory_mb = 512\n").parent
    words = [f"data.train=harbor:{folder}", *TOOLS, "sandbox.memory_mb=256"]
    refusal = failed(check_harbor_tasks, *words)["tasks' boxes"]
    assert "a and 1 other asks for environment.cpus up to 64; sandbox.cpus is 1 and sandbox.own_limits.cpus is 8" in (
        refusal.found
    )
    fixes = ["sandbox.cpus=64", "sandbox.own_limits.cpus=64", "sandbox.memory_mb=512"]
    assert refusal.fix == f"{' and '.join(f'set {fix}' for fix in fixes)}, or leave these tasks out"
    assert failed(check_harbor_tasks, *words[:-1], *fixes) == {}


def test_fewer_processes_than_grading_needs_are_refused(write_task: WriteTask) -> None:
    words = [f"data.train=harbor:{write_task().parent}", *TOOLS]
    assert_refused(check_harbor_tasks, [*words, "sandbox.pids=9"], r"pids is 9.*set sandbox\.pids=64")
    assert failed(check_harbor_tasks, *words, "sandbox.pids=10") == {}
