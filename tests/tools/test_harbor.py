"""An agent, played, works on a Harbor task with the tools of a recipe's `harbor` entry; its tests are the reward."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agent_loops.conftest import tokenizer_for
from tests.sandbox.harbor.conftest import BOXES, TASKS, WriteTask, write_task

from penstock.agent_loops import InfraFailure
from penstock.sandbox import make_sandbox
from penstock.sandbox.harbor import read_task
from penstock.testing import FakeSandbox, try_loop
from penstock.tools import NoToolReward, ToolConfig, make_tools
from penstock.transfer_queue import Task, Trajectory

__all__ = ["tokenizer_for", "write_task"]
pytestmark = pytest.mark.bwrap
SANDBOX = BOXES.model_copy(update={"max_boxes": 1})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task_of(folder: Path) -> Task:
    one = read_task(folder)
    extra = {"index": 0, "instance_id": one.name, "harbor_task": str(one.folder)}
    return Task("eval/0/0", "eval/0", [{"role": "user", "content": one.instruction}], "harbor", "", extra_info=extra)


@pytest.fixture
def play(tokenizer_for, tmp_path):
    """Trajectory of one played episode of a task's folder."""
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / "model")

    async def go(folder: Path, says: list[str], settings: Mapping[str, Any] | None = None) -> Trajectory:
        task = task_of(folder)
        tools = [ToolConfig(name="harbor", timeout_s=300, settings=dict(settings or {}))]
        budget = {"max_turns": 8, "max_response_tokens": 20000, "max_new_tokens": 2000}
        budget["reward"] = "penstock.tools.swe:tool_reward"
        return await try_loop(
            "tool_agent", task, model=str(tmp_path / "model"), says=says, tools=tools, sandbox=SANDBOX, **budget
        )

    return go


def test_one_entry_makes_three_tools_of_one_box() -> None:
    tools = make_tools([ToolConfig(name="harbor")], FakeSandbox())
    assert list(tools) == ["shell", "editor", "submit"]


async def test_a_played_agent_earns_what_the_tests_say(play) -> None:
    right = await play(
        TASKS / "hello-file",
        [
            call("shell", command="pwd"),
            call("editor", command="create", path="hello.txt", text="hello\n"),
            call("submit"),
        ],
    )
    assert (right.reward, right.outcome.kind) == (1.0, "completed")
    assert right.extra["tool_results"][0] == "/app"
    assert (await play(TASKS / "hello-file", [call("shell", command="ls"), call("submit")])).reward == 0.0
    assert (await play(TASKS / "hello-file", ["I do not know."])).reward == 0.0


async def test_a_service_that_an_agent_starts_runs_until_it_is_graded(play, write_task: WriteTask) -> None:
    asks = "exec 3<>/dev/tcp/127.0.0.1/7001"
    folder = write_task(test=f"(({asks}) && echo 1 || echo 0) > /logs/verifier/reward.txt")
    serves = "nohup python3 -m http.server 7001 >/dev/null 2>&1 &"
    waits = f"for i in $(seq 1000); do ({asks}) 2>/dev/null && break; sleep 0.1; done"
    assert (await play(folder, [call("shell", command=f"{serves} {waits}"), call("submit")])).reward == 1.0


async def test_the_tasks_time_limit_ends_the_episode(play, write_task: WriteTask) -> None:
    folder = write_task(toml="[agent]\ntimeout_sec = 0.2\n")
    says = [call("shell", command="sleep 0.3"), call("shell", command="touch /app/done"), "Done."]
    ended = await play(folder, says)
    assert (ended.reward, ended.extra["tool_results"][-1]) == (0.0, "The time for this task is up.")


async def test_tests_without_a_reward_are_a_failure_or_a_zero(play, write_task: WriteTask) -> None:
    folder = write_task(test="echo lost; exit 1")
    says = [call("shell", command="true"), call("submit")]
    with pytest.raises(InfraFailure, match="harbor: task made: its tests wrote no reward"):
        await play(folder, says, {"no_reward": "infra_error"})
    with pytest.raises(InfraFailure, match="its tests wrote no reward"):
        await play(folder, says)
    assert (await play(folder, says, {"no_reward": "zero"})).reward == 0.0
    for written in ("1" + 400 * "0", 20_000 * "["):  # no float, and deeper than a parser goes
        (folder / "tests" / "test.sh").write_text(f"echo '{written}' > /logs/verifier/reward.json")
        with pytest.raises(InfraFailure, match=r"reward.json"):
            await play(folder, says, {"no_reward": "infra_error"})
        assert (await play(folder, says, {"no_reward": "zero"})).reward == 0.0


async def test_one_of_several_rewards_is_named(play, write_task: WriteTask) -> None:
    folder = write_task(test='echo \'{"speed": 0.25, "size": 1}\' > /logs/verifier/reward.json')
    says = [call("shell", command="true"), call("submit")]
    assert (await play(folder, says, {"reward_key": "speed"})).reward == 0.25
    for choice in ("auto", "zero", "infra_error"):
        with pytest.raises(InfraFailure, match="several rewards"):
            await play(folder, says, {"no_reward": choice})
        with pytest.raises(InfraFailure, match="no reward is called 'weight'"):
            await play(folder, says, {"reward_key": "weight", "no_reward": choice})


@pytest.mark.parametrize("left", ["echo lost", 'echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json'])
async def test_a_reward_that_is_missing_is_left_to_the_run(write_task: WriteTask, left: str) -> None:
    """The tool reports that there is no reward; the run knows if the data source's tests can write one."""
    damaged = write_task("damaged", test=left)
    sandbox = make_sandbox(SANDBOX, "tests-no-reward")
    (shell, *_) = make_tools([ToolConfig(name="harbor")], sandbox).values()

    box = await shell.create(task_of(damaged))
    try:
        await box.session()
        with pytest.raises(NoToolReward, match="reward"):
            await shell.calc_reward(box)
    finally:
        await shell.release(box)
        await sandbox.close()


async def test_the_patch_of_an_episode_is_kept(play, write_task: WriteTask, tmp_path: Path) -> None:
    git = "git -c user.name=a -c user.email=a@b"
    toml = f'[environment.healthcheck]\ncommand = "git init -q . && echo 1 > f && git add f && {git} commit -qm one"\n'
    folder = write_task("owner__name-7", toml=toml)
    says = [call("shell", command="echo 2 > f; touch done"), call("submit")]
    assert (await play(folder, says, {"predictions": str(tmp_path / "kept")})).reward == 1.0
    (file,) = (tmp_path / "kept").iterdir()
    kept = json.loads(file.read_text())
    assert kept["instance_id"] == "owner__name-7"
    assert "-1\n+2\n" in kept["model_patch"]


async def test_a_folder_that_is_gone_is_a_failure_with_its_name(play, write_task: WriteTask) -> None:
    folder = write_task()
    task = task_of(folder)
    tool = make_tools([ToolConfig(name="harbor")], FakeSandbox())["shell"]
    (folder / "tests/test.sh").unlink()
    with pytest.raises(Exception, match=r"harbor: task made: tests/test.sh is missing"):
        await tool.create(task)
    with pytest.raises(Exception, match=r"harbor: the row has no harbor_task"):
        await tool.create(dataclasses.replace(task, extra_info={}))
