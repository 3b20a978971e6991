"""Task folders read as they are: what they ask for, and what is refused by its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.sandbox.harbor.conftest import TASKS, TERMINAL_BENCH, WriteTask

from penstock.sandbox import BoxNeeds
from penstock.sandbox.harbor import HarborTaskError, find_task_folders, packed, read_task, tasks_of
from penstock.sandbox.harbor.task import resolved


def test_a_task_asks_for_its_image_limits_and_variables() -> None:
    task = read_task(TASKS / "entry-service")
    assert task.image is not None
    assert task.image.startswith("penstock-harbor/entry-service:")
    assert task.needs == BoxNeeds(own_root=True, memory_mb=512, cpus=1.0, storage_mb=512)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (120, 120, 300)
    assert task.variables["COUNTER_START"] == "40"
    assert task.healthcheck is not None
    assert (task.healthcheck.interval_s, task.healthcheck.retries) == (0.2, 3)
    assert task.instruction.startswith("A counter answers")
    assert task.has_solution


def test_a_folder_of_tasks_is_read_by_name() -> None:
    names = [task.name for task in tasks_of(TASKS)]
    assert len(names) == 10
    assert names == sorted(names)
    assert find_task_folders(TASKS / "c-build") == [TASKS / "c-build"]


def test_an_image_is_named_by_all_that_it_is_built_from(tmp_path: Path) -> None:
    folder = tmp_path / "c-build"
    shutil.copytree(TASKS / "c-build", folder)
    first = read_task(folder).image
    (folder / "tests/test.sh").write_text("exit 1\n")
    assert read_task(folder).image == first
    (folder / "environment/main.c").write_text("int main(void) { return 0; }\n")
    assert read_task(folder).image != first


def test_a_ready_image_needs_no_build_and_takes_files(write_task: WriteTask) -> None:
    toml = '[environment]\ndocker_image = "python:3.12-slim"\nmemory = "2G"\nstorage = "10240M"\n'
    task = read_task(write_task(toml=toml, files={"environment/data.txt": "x\n"}))
    assert (task.image, task.build) == ("python:3.12-slim", None)
    assert task.uploads == task.folder / "environment"
    assert (task.needs.memory_mb, task.needs.storage_mb) == (2048, 10240)


REFUSED = {
    "no tests": ("", {"tests/test.sh": ""}, r"tests/test\.sh is missing"),
    "no instruction": ("", {"instruction.md": " \n"}, "instruction.md is empty"),
    "no solve.sh": ("", {"solution/solve.sh": "", "solution/notes.txt": "x"}, "solution/ has no solve.sh"),
    "toml": ("agent = [", {}, "task.toml cannot be read"),
    "compose": ("", {"environment/docker-compose.yaml": "services: {}\n"}, "several containers"),
    "steps": ('[[steps]]\nname = "one"\n', {}, "steps"),
    "gpus": ("[environment]\ngpus = 1\n", {}, "environment.gpus"),
    "windows": ('[environment]\nos = "Windows"\n', {}, "environment.os"),
    "mcp": ('[[environment.mcp_servers]]\nname = "a"\n', {}, "environment.mcp_servers"),
    "separate": ('[verifier]\nenvironment_mode = "separate"\n', {}, "environment_mode separate"),
    "separate by its environment": ("[verifier.environment]\ncpus = 1\n", {}, "environment_mode separate"),
    "another user": ('[agent]\nuser = "agent"\n', {}, "agent.user agent"),
    "a size": ('[environment]\nmemory = "much"\n', {}, "environment.memory must be a size"),
    "a time": ('[verifier]\ntimeout_sec = "long"\n', {}, "verifier.timeout_sec must be a number"),
    "a negative time": ("[agent]\ntimeout_sec = -3\n", {}, r"agent.timeout_sec must be a positive number, found -3"),
    "variables": ("[environment.env]\nA = 1\n", {}, "environment.env must map names to texts"),
}


def test_tables_and_keys_that_harbor_lacks_are_named(write_task: WriteTask) -> None:
    known = 'schema_version = "1.4"\nsource = "a"\nartifacts = ["/app"]\nmulti_step_reward_strategy = "mean"\n'
    tables = "[task]\nname = 'a/b'\n[metadata]\nany = 1\n[solution]\n[enviroment]\ncpus = 2\n"
    task = read_task(write_task(toml=f"{known}timeout = 3\n{tables}[environment]\npids = 4096\n"))
    assert task.ignored == (
        "timeout is not a key of Harbor and is ignored",
        "[enviroment] is not a table of Harbor and is ignored; did you mean 'environment'?",
        "environment.pids is not a key of Harbor and is ignored: set sandbox.pids in the recipe, the processes of every"
        " box",
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_unsupported_is_refused_by_name(write_task: WriteTask, case: str) -> None:
    toml, files, named = REFUSED[case]
    with pytest.raises(HarborTaskError, match=rf"task made: .*{named}"):
        read_task(write_task(toml=toml, files=files))


def test_all_broken_tasks_of_a_folder_are_named_at_once(write_task: WriteTask) -> None:
    write_task("first", files={"tests/test.sh": ""})
    folder = write_task("second", toml="[environment]\ngpus = 2\n").parent
    write_task("third")
    with pytest.raises(HarborTaskError) as caught:
        tasks_of(folder)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["task first", "task second"]


def test_no_folder_and_no_tasks_are_named(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "a.toml").touch()
    wrong = {
        tmp_path / "taks": f"{tmp_path}/taks: no such folder; did you mean 'tasks'",
        tmp_path: "neither it nor a folder in it",
        tmp_path / "a.toml": f"a file; give its folder, {tmp_path}",
    }
    for folder, named in wrong.items():
        with pytest.raises(HarborTaskError, match=named):
            find_task_folders(folder)


def test_a_task_reads_no_variable_that_it_was_not_given() -> None:
    written = {"A": "plain", "B": "${HOME}", "C": "${MAYBE:-else}", "D": "x${HOME}"}
    with pytest.raises(HarborTaskError, match=r"B is the variable HOME .* pass_env"):
        resolved(written, {}, "task t: environment.env")
    given = {"HOME": "/h", "MAYBE": "m"}
    assert resolved(written, given, "") == {"A": "plain", "B": "/h", "C": "m", "D": "x${HOME}"}


def test_a_pack_is_the_same_for_the_same_files(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.sh").write_text("true\n")
    (folder / "link").symlink_to("a.sh")
    first = packed(folder, {"b": b"more"})
    (folder / "a.sh").touch()
    assert packed(folder, {"b": b"more"}) == first
    assert packed(folder) != first


def test_a_folder_that_is_a_link_or_too_large_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a task by others it would be a folder of this machine, which the model then reads."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "key").write_bytes(bytes(100))
    (tmp_path / "tests").symlink_to("theirs")
    with pytest.raises(OSError, match="tests is a link"):
        packed(tmp_path / "tests")
    monkeypatch.setattr("penstock.sandbox.harbor.packing.MAX_PACKED_BYTES", 99)
    with pytest.raises(OSError, match="theirs has more than"):
        packed(tmp_path / "theirs")


# ---- Terminal-Bench's older format


def test_the_older_format_maps_to_the_same_task() -> None:
    task = read_task(TERMINAL_BENCH / "old-format")
    assert task.build is not None
    assert task.build.left_out == {"task.yaml", "docker-compose.yaml", "solution.sh", "run-tests.sh", "tests"}
    assert task.build.dockerfile.splitlines()[-2:] == ["ENV TEST_DIR=/tests", 'ENV EXPECTED="3"']
    assert task.test_script is not None
    assert b'"/tests/check.py"' in task.test_script
    assert b"echo 0 > /logs/verifier/reward.txt" in task.test_script
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (60, 60)
    assert task.has_solution


COMPOSE = "docker-compose.yaml"
SOCKET = "    volumes:\n      - /var/run/docker.sock:/var/run/docker.sock\n"
INEXACT = {  # file, what is replaced in it, by what, the words of the refusal
    "two containers": (COMPOSE, "services:\n", "services:\n  database: {image: postgres}\n", "2 services"),
    "a privileged one": (COMPOSE, "    command:", "    privileged: true\n    command:", "privileged cannot be mapped"),
    "volumes": (COMPOSE, "    volumes:\n", SOCKET, "its volumes cannot be mapped"),
    "networks": (COMPOSE, "services:\n", "networks: {inner: {}}\nservices:\n", "networks cannot be mapped"),
    "a variable": (COMPOSE, "EXPECTED=3", "EXPECTED=${SECRET}", "EXPECTED is a variable of the machine"),
    "build arguments": (COMPOSE, "dockerfile: Dockerfile", "args: {A: b}", "build.args cannot be mapped"),
    "another parser": ("task.yaml", "parser_name: pytest", "parser_name: sweb", "parser_name"),
    "the same shell": ("task.yaml", "shell: false", "shell: true", "run_tests_in_same_shell"),
    "no instruction": ("task.yaml", "instruction:", "note:", "instruction is missing"),
}


@pytest.fixture
def old_format(tmp_path: Path) -> Path:
    folder = tmp_path / "old-format"
    shutil.copytree(TERMINAL_BENCH / "old-format", folder)
    return folder


@pytest.mark.parametrize("case", INEXACT)
def test_what_cannot_be_mapped_exactly_is_refused_by_name(old_format: Path, case: str) -> None:
    file, old, new, named = INEXACT[case]
    text = (old_format / file).read_text()
    assert old in text
    (old_format / file).write_text(text.replace(old, new))
    with pytest.raises(HarborTaskError, match=named):
        read_task(old_format)


def test_a_solution_typed_into_a_terminal_and_missing_tests_are_refused(old_format: Path) -> None:
    (old_format / "solution.yaml").write_text("- command: ls\n")
    with pytest.raises(HarborTaskError, match=r"solution\.yaml"):
        read_task(old_format)
    (old_format / "solution.yaml").unlink()
    (old_format / "run-tests.sh").unlink()
    with pytest.raises(HarborTaskError, match=r"run-tests\.sh is missing"):
        read_task(old_format)
