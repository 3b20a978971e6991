"""Folders of Harbor's tasks as a dataset, and the check that proves them: resumed, in a table, as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from tests.sandbox.harbor.conftest import BOXES, TASKS, WriteTask, write_task
from typer.testing import CliRunner

from penstock.datasets import BadSpec, check_spec, is_generated, materialise
from penstock.datasets.harbor import Checker
from penstock.datasets.harbor.check import TaskTrial
from penstock.deploy import app, load_config
from penstock.sandbox import Sandbox, SandboxError, make_sandbox
from penstock.sandbox.harbor import HarborTask, HarborTaskError, find_task_folders
from penstock.testing import FakeSandbox
from penstock.trainer import DataError, load_rows

__all__ = ["write_task"]
SHIPPED = Path(__file__).parents[2] / "recipes" / "harbor"


async def no_build(task: HarborTask) -> None:
    """Tasks without an image."""


def test_a_folder_of_tasks_is_a_dataset(tmp_path: Path) -> None:
    rows = pq.read_table(materialise(f"harbor:{TASKS}", tmp_path)).to_pylist()
    assert [row["extra_info"]["instance_id"] for row in rows] == sorted(path.name for path in TASKS.iterdir())
    (hello,) = (row for row in rows if row["extra_info"]["instance_id"] == "hello-file")
    assert hello["prompt"] == [{"role": "user", "content": (TASKS / "hello-file/instruction.md").read_text().strip()}]
    assert hello["extra_info"]["harbor_task"] == str(TASKS / "hello-file")
    assert is_generated("harbor:x")


def test_a_folder_that_cannot_be_used_is_named_before_the_run(write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task("without-tests", files={"tests/test.sh": ""}).parent
    for refuse in (check_spec, lambda spec: materialise(spec, tmp_path)):
        with pytest.raises(BadSpec, match=r"harbor:.*task without-tests: tests/test.sh is missing"):
            refuse(f"harbor:{folder}")


def test_a_recipe_names_a_folder_beside_it(write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task().parent
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text("model: m\ndata: {train: 'harbor:tasks'}\n")
    assert load_config(recipe).data.train == f"harbor:{folder}"


@pytest_asyncio.fixture
async def boxes() -> AsyncIterator[Sandbox]:
    made = make_sandbox(BOXES, f"tests-{os.getpid()}")
    yield made
    await made.close()


@pytest.mark.bwrap
async def test_unsound_tasks_are_found_and_the_others_proven(
    boxes: Sandbox, write_task: WriteTask, tmp_path: Path
) -> None:
    folders = [
        write_task("a-sound"),
        write_task("b-solution-is-wrong", solve="echo tried; exit 4"),
        write_task("c-nothing-is-enough", test="echo 1 > /logs/verifier/reward.txt"),
        write_task("d-no-reward", test="echo broken; exit 1"),
        write_task("e-no-solution", files={"solution/solve.sh": ""}),
        write_task("f-no-tests", files={"tests/test.sh": ""}),
        write_task("g-never-ends", toml="[agent]\ntimeout_sec = 1\n", solve="sleep 1000"),
    ]
    said: list[str] = []
    checker = Checker(boxes, tmp_path / "record.jsonl", no_build, {}, concurrency=3, report=said.append)
    found = {one.task[0]: one for one in await checker.check(folders)}
    assert [name for name, one in found.items() if one.sound] == ["a"]
    assert "oracle: reward 0" in found["b"].problem
    assert "status 4: tried" in found["b"].problem
    assert "empty: reward 1, doing nothing must earn less" in found["c"].problem
    assert "wrote no reward" in found["d"].problem
    assert "no solution" in found["e"].problem
    assert found["f"].problem.startswith("tests/test.sh is missing"), "the line has the task's name already"
    assert "its solution was ended by its time limit of 1 s, agent.timeout_sec" in found["g"].problem
    assert len([line for line in said if " of 7: " in line]) == 7


FORKS = "echo 'bash: fork: retry: Resource temporarily unavailable' >&2; " * 4 + "exit 254"
LIMITS = {
    "processes": (FORKS, FORKS, "sandbox.pids", "254"),
    "memory": ("kill -9 $$", "exit 1", "sandbox.memory_mb", "137|-9"),
    "disk": (
        "dd if=/dev/zero of=/app/full bs=1M; dd if=/dev/zero of=/app/rest bs=1",
        "echo 1 > /logs/verifier/reward.txt",
        "sandbox.tmp_mb",
        "disk is full",
    ),
}
"""Limits of a box: (solution, tests, the setting to raise, further words of the problem)."""


@pytest.mark.bwrap
@pytest.mark.parametrize("case", LIMITS)
async def test_a_limit_of_the_box_is_one_cause_with_its_setting(
    boxes: Sandbox, write_task: WriteTask, tmp_path: Path, case: str
) -> None:
    solve, test, setting, words = LIMITS[case]
    folder = write_task(solve=solve, test=test, files={"tests/big.txt": "x" * 8192})
    (found,) = await Checker(boxes, tmp_path / "record.jsonl", no_build, {}).check([folder])
    assert found.problem.count(f"raise {setting}") == 1, found.problem
    assert re.search(words, found.problem), found.problem
    assert found.problem.count("fork: retry") == (case == "processes")


class Counting(FakeSandbox):
    """Fails where it would start a box: what is recorded asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 1000


@pytest.mark.bwrap
async def test_a_check_that_was_stopped_continues(boxes: Sandbox, write_task: WriteTask, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    done, changed, new = write_task("done"), write_task("changed"), write_task("new")
    await Checker(boxes, record, no_build, {}).check([done, changed])
    with record.open("a") as file:
        file.write('{"task": "new", "dig')  # as a killed check leaves it
    (changed / "instruction.md").write_text("Something else.\n")
    nothing = Counting()
    found = {one.task: one for one in await Checker(nothing, record, no_build, {}).check([done, changed, new])}
    assert found["done"].sound
    assert {name for name, one in found.items() if "no box today" in one.problem} == {"changed", "new"}
    assert nothing.started == 2, "a failure of the sandbox says nothing of a task, and is tried again"
    assert all(one.sound for one in await Checker(boxes, record, no_build, {}).check([done, changed, new]))
    assert len(record.read_text().splitlines()) == 8
    (other,) = await Checker(nothing, record, no_build, {}, boxes="memory_mb 128").check([done])
    assert "no box today" in other.problem, "a result of other boxes does not count"
    await Checker(boxes, record, no_build, {}).check([new], again=True)
    assert {json.loads(line)["task"] for line in record.read_text().splitlines()} == {"done", "changed", "new"}


async def test_another_file_is_no_record_and_is_left_alone(write_task: WriteTask, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(HarborTaskError, match=r"mine\.jsonl is no record"):
        await Checker(FakeSandbox(), tmp_path / "mine.jsonl", no_build, {}).check([write_task()])
    assert (tmp_path / "mine.jsonl").read_text() == '{"mine": 1}\n'


async def test_an_image_that_cannot_be_built_is_the_tasks_problem(write_task: WriteTask, tmp_path: Path) -> None:
    async def fails(task: HarborTask) -> None:
        raise SandboxError(f"image {task.name} cannot be built")

    (found,) = await Checker(FakeSandbox(), tmp_path / "record.jsonl", fails, {}).check([write_task()])
    assert (found.sound, found.problem) == (False, "image made cannot be built")


@pytest.mark.bwrap
def test_the_command_prints_a_table_or_json_and_its_status(write_task: WriteTask) -> None:
    folder = write_task("good").parent
    write_task("bad", test="echo 1 > /logs/verifier/reward.txt")
    command = ["data", "check", str(folder), "--backend", "bwrap"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 1, ended.output
    assert "1 of 2 tasks are sound" in ended.output
    assert (folder.parent / "tasks.check.jsonl").is_file()
    ended = CliRunner().invoke(app, [*command, "--task", "good", "--json"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.output.splitlines()[-1])
    assert (found["task"], found["sound"]) == ("good", True)
    assert found["probes"]["oracle"]["reward"] == 1.0


@pytest.mark.bwrap
def test_an_unsound_task_shows_what_was_written_and_keys_that_nobody_reads(write_task: WriteTask) -> None:
    test = "seq 3000; echo wrong: 41 of 42; echo 0 > /logs/verifier/reward.txt"
    toml = "[environment]\nmemory_gb = 64\nallow_internet = false\n[agent]\ntimeout_secs = 1\n[metadata]\nmine = 1\n"
    folder = write_task("short", test=test, solve="echo nothing done; exit 0", toml=toml)
    ended = CliRunner().invoke(app, ["data", "check", str(folder), "--backend", "bwrap"])
    lines = ended.stdout.splitlines()
    (verdict,) = (line for line in lines if line.startswith("short  "))
    assert verdict.endswith("oracle: reward 0, its own solution must earn 1"), "in one line: it is no terminal"
    assert "    nothing done" in lines
    assert lines.count("    wrong: 41 of 42") == 1, "doing nothing earned 0, as it must"
    record = [json.loads(line) for line in (folder.parent / "short.check.jsonl").read_text().splitlines()]
    assert [one["solution_output"] for one in record] == ["nothing done", ""]
    assert all(one["tests_output"].endswith("wrong: 41 of 42") for one in record)
    ignored = [line for line in ended.stderr.splitlines() if "is ignored" in line]
    assert len(ignored) == 2
    assert "agent.timeout_secs is not a key of Harbor and is ignored; did you mean 'timeout_sec'?" in ignored[0]
    assert "did you mean 'memory_mb'?" in ignored[1]


def test_a_record_among_tasks_is_no_task(write_task: WriteTask, tmp_path: Path) -> None:
    folder = write_task("one").parent
    (folder / "one.check.jsonl").write_text('{"task": "one"}\n')
    assert [path.name for path in find_task_folders(folder)] == ["one"]
    with pytest.raises(DataError, match="did you mean harbor:"):
        load_rows(folder)


@pytest.mark.bwrap
def test_the_boxes_are_the_recipes_with_its_overrides(tmp_path: Path) -> None:
    command = ["data", "check", str(SHIPPED / "tasks"), "--recipe", str(SHIPPED / "tools.yaml"), "--task", "hello-file"]
    ended = CliRunner().invoke(app, [*command, "--record", str(tmp_path / "record"), "sandbox.memory_mb=64", "--json"])
    assert "set sandbox.memory_mb=256" in json.loads(ended.stdout)["problem"], ended.output


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--task", "none"], "has no task none"),
        (["--backend", "vm"], "backend"),
        (["--recipe", "no.yaml"], "no.yaml"),
        (["sandbox.memory_mb=1024"], "add --recipe"),
        (["--recipe", str(SHIPPED / "tools.yaml"), "sandbox.pids=4"], "sandbox.pids is 4"),
    ],
)
def test_the_command_names_what_is_wrong(write_task: WriteTask, more: list[str], named: str) -> None:
    ended = CliRunner().invoke(app, ["data", "check", str(write_task().parent), "--backend", "bwrap", *more])
    assert ended.exit_code == 2
    assert named in ended.output


def test_patches_are_exported_as_predictions(tmp_path: Path) -> None:
    folder, out = tmp_path / "predictions", tmp_path / "out/predictions.jsonl"
    folder.mkdir()
    for episode, instance, patch in (("e.0", "a__a-1", "one\n"), ("e.1", "a__a-1", "two\n"), ("e.2", "b__b-2", "")):
        (folder / f"{episode}.json").write_text(json.dumps({"instance_id": instance, "model_patch": patch}))
    command = ["data", "export", str(folder), "--out", str(out), "--model", "mine"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [
        {"instance_id": "a__a-1", "model_name_or_path": "mine", "model_patch": "one\n"},
        {"instance_id": "b__b-2", "model_name_or_path": "mine", "model_patch": ""},
    ]
    ended = CliRunner().invoke(app, [*command, "--sample", "1"])
    assert "without a sample 1: b__b-2" in ended.output
    assert [json.loads(line)["model_patch"] for line in out.read_text().splitlines()] == ["two\n"]
    for given, named in ((tmp_path / "none", "no predictions"), (tmp_path / "out", "no predictions")):
        ended = CliRunner().invoke(app, ["data", "export", str(given), "--out", str(out), "--model", "m"])
        assert (ended.exit_code, named in ended.output) == (2, True)


def test_a_sum_that_rounds_to_just_below_the_full_reward_is_full() -> None:
    trials = [TaskTrial("t", "", agent, 0.7 + 0.2 + 0.1) for agent in ("oracle", "empty")]
    assert [trial.right for trial in trials] == [True, False]
