"""A task open in a box: solved, graded as Harbor's verifier does it, and whatever a task or an agent does wrong."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.sandbox.harbor.conftest import BOXES, TASKS, WriteTask
from tests.sandbox.server.conftest import TOKEN, serving

from penstock.sandbox import BoxNeeds, RemoteSandbox, RunResult, Sandbox, make_sandbox
from penstock.sandbox.harbor import HarborEnvironment, HarborTaskError, find_limit, read_task, without_repeats
from penstock.sandbox.harbor.environment import LEAST_PIDS, HarborGrade
from penstock.sandbox.protocol import UnmetNeeds
from penstock.sandbox.session import DriverSession

pytestmark = pytest.mark.bwrap
REWARDS = "/logs/verifier/reward"


async def opened(boxes: Sandbox, folder: Path) -> HarborEnvironment:
    return await HarborEnvironment.open(boxes, read_task(folder))


async def graded(boxes: Sandbox, folder: Path, agent: str = "true") -> HarborGrade:
    environment = await opened(boxes, folder)
    try:
        await environment.run(agent, 60.0)
        return await environment.grade()
    finally:
        await environment.close()


async def test_the_solution_earns_it_and_nothing_does_not(boxes: Sandbox) -> None:
    environment = await opened(boxes, TASKS / "hello-file")
    assert environment.folder == "/app"
    before = await environment.grade()
    assert (await environment.solve()).exit_code == 0
    after = await environment.grade()
    await environment.close()
    assert (before.reward, after.reward) == (0.0, 1.0)
    assert (before.why_none(), after.why_none()) == ("", "")


FILES = {
    "text": (f"echo ' 0.25 ' > {REWARDS}.txt", 0.25, ""),
    "json before text": (f'echo 1 > {REWARDS}.txt; echo \'{{"reward": 0.5, "more": 3}}\' > {REWARDS}.json', 0.5, ""),
    "the only one": (f"echo '{{\"score\": 2}}' > {REWARDS}.json", 2.0, ""),
    "a bare number": (f"echo 0.75 > {REWARDS}.json", 0.75, ""),
    "its status counts for nothing": (f"echo 1 > {REWARDS}.txt; exit 3", 1.0, ""),
    "none of several": (f'echo \'{{"a": 1, "b": 2}}\' > {REWARDS}.json', None, "none is called 'reward': a, b"),
    "none": ("echo looked; exit 0", None, "wrote no reward.*looked"),
    "empty": (f": > {REWARDS}.txt", None, "it is empty"),
    "no number": (f"echo passed > {REWARDS}.txt", None, "passed"),
    "NaN": (f"echo nan > {REWARDS}.txt", None, "not a finite number"),
    "infinity in JSON": (f"echo '{{\"reward\": 1e999}}' > {REWARDS}.json", None, "not a finite number"),
    "a text in JSON": (f'echo \'{{"reward": "1"}}\' > {REWARDS}.json', None, "not a finite number"),
    "broken JSON before text": (f"echo 1 > {REWARDS}.txt; echo '{{' > {REWARDS}.json", None, "reward.json"),
}


async def test_reward_files_are_read_as_harbors_verifier_writes_them(boxes: Sandbox, write_task: WriteTask) -> None:
    for number, (case, (script, reward, why)) in enumerate(FILES.items()):
        grade = await graded(boxes, write_task(f"task-{number}", test=script))
        assert grade.reward == reward, case
        assert re.search(why, grade.why_none(), re.DOTALL), (case, grade.why_none())


async def test_what_an_agent_plants_for_the_tests_is_gone(boxes: Sandbox, write_task: WriteTask) -> None:
    agent = (
        "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/helper.sh;"
        "echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json"
    )
    folder = write_task(
        test="if [ -f /tests/helper.sh ]; then . /tests/helper.sh; else echo 0 > /logs/verifier/reward.txt; fi"
    )
    assert (await graded(boxes, folder, agent)).reward == 0.0


async def test_variables_go_where_the_task_says(boxes: Sandbox, write_task: WriteTask) -> None:
    toml = '[environment.env]\nA = "1"\n[verifier.env]\nB = "2"\n[solution.env]\nC = "3"\n'
    folder = write_task(
        toml=toml,
        test='[ "$A$B$C" = 12 ] && [ "$(cat /app/said)" = 13 ] && echo 1 > /logs/verifier/reward.txt',
        solve='echo "$A$B$C" > /app/said',
    )
    environment = await opened(boxes, folder)
    await environment.solve()
    assert (await environment.grade()).reward == 1.0
    await environment.close()


async def test_tests_that_never_end_are_no_reward_with_their_cause(boxes: Sandbox, write_task: WriteTask) -> None:
    grade = await graded(boxes, write_task(toml="[verifier]\ntimeout_sec = 1\n", test="sleep 1000"))
    assert grade.reward is None
    assert "ran longer than 1 s" in grade.why_none()


FLOODS = {
    "output": ("yes | head -c 20000000", 0.0),
    "forks": ("f() { f | f & }; f; sleep 1", 0.0),
    "files": ("head -c 200000000 /dev/zero > /app/large", None),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_agents_that_flood_are_graded_and_block_no_other(
    boxes: Sandbox, write_task: WriteTask, flood: str
) -> None:
    agent, reward = FLOODS[flood]
    folder, other = write_task("floods"), write_task("other")
    environment = await opened(boxes, other)
    grades = await asyncio.gather(graded(boxes, folder, agent), environment.grade())
    await environment.close()
    assert grades[1].reward == 0.0
    assert grades[0].reward == reward or grades[0].why_none()


async def test_a_health_check_that_fails_is_the_tasks_fault(boxes: Sandbox, write_task: WriteTask) -> None:
    toml = '[environment.healthcheck]\ncommand = "echo not yet >&2; false"\ninterval_sec = 0.01\nretries = 2\n'
    with pytest.raises(HarborTaskError, match="health check fails: not yet"):
        await opened(boxes, write_task(toml=toml))


async def test_files_of_a_task_without_an_image_lie_in_its_folder(boxes: Sandbox, write_task: WriteTask) -> None:
    folder = write_task(
        files={"environment/data/one.txt": "1\n"},
        solve="cp data/one.txt done",
        toml='[environment]\nworkdir = "/app/deep"\n',
    )
    environment = await opened(boxes, folder)
    assert (await environment.run("pwd; cat data/one.txt")).stdout.split() == ["/app/deep", "1"]
    await environment.close()


async def test_the_patch_is_what_changed_in_the_repository(boxes: Sandbox, write_task: WriteTask) -> None:
    environment = await opened(boxes, write_task())
    assert await environment.patch() is None
    git = "git -c user.name=a -c user.email=a@b"
    await environment.run(f"git init -q . && echo 1 > f && git add f && {git} commit -qm one")
    inside = await HarborEnvironment.around(environment.session, environment.task)
    inside._base_commit = (await environment.run("git rev-parse HEAD")).stdout.strip()
    await environment.run(f"echo 2 > f && echo 3 > g && git add f && {git} commit -qm two")
    patch = await inside.patch()
    await environment.close()
    assert patch is not None
    assert [line for line in patch.decode().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-1",
        "+2",
        "+3",
    ]


async def test_limits_of_a_task_hold_or_are_refused(boxes: Sandbox, write_task: WriteTask) -> None:
    with pytest.raises(UnmetNeeds, match=r"memory_mb 4096.*sandbox\.memory_mb"):
        await opened(boxes, write_task(toml="[environment]\nmemory_mb = 4096\n"))
    settings = r"set sandbox\.own_limits\.memory_mb=90000 and sandbox\.memory_mb=90000"
    with pytest.raises(UnmetNeeds, match=settings):
        await opened(boxes, write_task(toml="[environment]\nmemory_mb = 90000\n"))


@pytest.mark.parametrize(
    ("output", "setting"),
    [
        ("sh: 1: Cannot fork", "sandbox.pids"),
        ("RuntimeError: can't start new thread", "sandbox.pids"),
        ("./run: line 2: 18 Killed python3 big.py", "sandbox.memory_mb"),
        ("tar: a: Cannot write: No space left on device", "sandbox.tmp_mb"),
        ("connect: Resource temporarily unavailable", ""),
    ],
)
def test_output_shows_the_limit_that_a_script_met(output: str, setting: str) -> None:
    assert (setting in find_limit(output)) if setting else find_limit(output) == ""


def test_a_limit_that_no_output_shows_is_known_by_the_scripts_end() -> None:
    assert "sandbox.memory_mb" in find_limit("", RunResult("", "", 137))
    assert "sandbox.cpu_s" in find_limit("", RunResult("", "", None, limit="cpu"))
    assert find_limit("", RunResult("", "", 1)) == ""


def test_a_complaint_that_is_repeated_is_quoted_once() -> None:
    assert without_repeats("ailed\nit failed\nit failed\nmore") == "it failed\nmore"


async def test_a_box_gets_no_root_of_its_own_unless_allowed(write_task: WriteTask) -> None:
    sandbox = make_sandbox(BOXES.model_copy(update={"own_root": False}), "tests-no-root")
    try:
        with pytest.raises(UnmetNeeds, match=r"sandbox\.own_root"):
            await opened(sandbox, write_task())
        session = await sandbox.start("plain")
        assert (await session.run(["sh", "-c", "mkdir /app || mkdir /tests"])).exit_code != 0
        await session.close()
    finally:
        await sandbox.close()


async def test_a_server_gives_tasks_their_boxes_where_its_settings_allow_it() -> None:
    task = read_task(TASKS / "hello-file")
    async with serving(BOXES) as url:
        sandbox = RemoteSandbox(BOXES, url, TOKEN)
        try:
            environment = await HarborEnvironment.open(sandbox, task)
            before = await environment.grade()
            await environment.solve()
            assert (before.reward, (await environment.grade()).reward) == (0.0, 1.0)
            await environment.close()
            for asked in (BoxNeeds(memory_mb=90_000), BoxNeeds(own_root=True, cpus=64.0)):
                with pytest.raises(UnmetNeeds, match=r"422.*own_limits"):
                    await sandbox.start("too much", needs=asked)
        finally:
            await sandbox.close()
    async with serving(BOXES.model_copy(update={"own_root": False})) as url:
        sandbox = RemoteSandbox(BOXES, url, TOKEN)
        try:
            with pytest.raises(UnmetNeeds, match=r"sandbox\.own_root"):
                await HarborEnvironment.open(sandbox, task)
        finally:
            await sandbox.close()


async def test_an_agent_that_lost_its_box_earns_what_doing_nothing_earns(boxes: Sandbox, write_task: WriteTask) -> None:
    """As where it fills its memory or its storage: the task is set up anew before it is graded."""
    toml = '[environment]\nworkdir = "/app/deep"\n[environment.healthcheck]\ncommand = "echo ready > /app/ready"\n'
    test = "if [ ! -e /app/done ] && [ -e /app/ready ]; then echo 0.25; else echo 1; fi > /logs/verifier/reward.txt"
    environment = await opened(boxes, write_task(toml=toml, test=test))
    await environment.run("touch /app/done")
    assert (await environment.grade()).reward == 1.0
    assert isinstance(environment.session, DriverSession)
    await environment.session._end_box()
    assert (await environment.grade()).reward == 0.25
    await environment.close()


async def test_an_agent_that_breaks_its_box_is_graded_without_a_reward(boxes: Sandbox, write_task: WriteTask) -> None:
    grade = await graded(boxes, write_task(), "rm -rf /logs/verifier && touch /logs/verifier")
    assert grade.reward is None
    assert "reward files cannot be removed" in grade.why_none()


async def test_a_box_without_room_for_the_tests_names_its_setting(
    write_task: WriteTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sandbox.harbor.environment.WAITS_WHILE_FULL", 1)
    small = make_sandbox(BOXES.model_copy(update={"pids": LEAST_PIDS - 1}), "tests-small-boxes")
    try:
        cause = (await graded(small, write_task())).why_none()
    finally:
        await small.close()
    assert cause.startswith("sandbox.pids leaves no room"), "who reports it names the task"
