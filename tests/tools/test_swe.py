"""An agent, played, repairs a repository with the tools of a recipe's `swe` entry; hidden tests say so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.agent_loops.conftest import tokenizer_for
from tests.sandbox.swe.conftest import rows

from penstock.agent_loops import InfraFailure
from penstock.sandbox import SandboxConfig, SandboxLost, make_sandbox
from penstock.testing import try_loop
from penstock.tools import ToolConfig, ToolConfigError, ToolInfraError, make_tools, sharing
from penstock.tools.swe import tool_reward
from penstock.transfer_queue import Task

__all__ = ["rows", "tokenizer_for"]
pytestmark = pytest.mark.bwrap
SANDBOX = SandboxConfig(max_boxes=1, memory_mb=512, tmp_mb=128, run_timeout_s=20.0, pids=128)
LIMITS = {"test_timeout_s": 5.0, "tests_timeout_s": 60.0, "command_timeout_s": 60.0}


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPAIR = [
    call("shell", command="pwd; git log --oneline | wc -l; python3 -m pytest -q 2>&1 | tail -1")
    + call("editor", command="view", path="wordkit/slug.py", lines=[6, 8]),
    call("editor", command="replace", path="wordkit/slug.py", old_text='"-".join', text="sep.join"),
    call("shell", command='python3 -c \'from wordkit.slug import slugify; print(slugify("a b", sep="_"))\''),
    call("submit"),
]


@pytest.fixture
def play(rows, tokenizer_for, tmp_path):
    """Trajectory of one played episode of the first task."""
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / "model")

    async def go(says, settings=None, row=None):
        row = row or rows[0]
        task = Task(
            "eval/0/0", "eval/0", [{"role": "user", "content": row["problem_statement"]}], "swe", "", extra_info=row
        )
        tools = [ToolConfig(name="swe", timeout_s=300, settings={**LIMITS, **(settings or {})})]
        budget = {
            "max_turns": 8,
            "max_response_tokens": 20000,
            "max_new_tokens": 2000,
            "reward": "penstock.tools.swe:tool_reward",
        }
        return await try_loop(
            "tool_agent", task, model=str(tmp_path / "model"), says=says, tools=tools, sandbox=SANDBOX, **budget
        )

    return go


async def test_swe_tools_played_agent_repairs_the_repository(play):
    trajectory = await play(REPAIR)
    first, seen, edited, ran, done = trajectory.extra["tool_results"]
    assert first.startswith("/tmp/repo\n1\n.....")
    assert 'return "-".join(words)' in seen
    assert "return sep.join(words)" in edited
    assert (ran, done) == ("a_b", "submitted")
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 4)
    rewards = {key: value for key, value in trajectory.metrics.items() if key.startswith("tool_reward/")}
    assert rewards == {"tool_reward/shell": 1.0}


async def test_swe_tools_the_patch_of_each_episode_is_kept(play, rows, tmp_path):
    kept = tmp_path / "kept"
    await play([REPAIR[1], call("submit")], {"predictions": str(kept), "decoys": 0})
    (file,) = kept.iterdir()
    line = json.loads(file.read_text())
    assert line["instance_id"] == rows[0]["instance_id"]
    assert "+    return sep.join(words)" in line["model_patch"]


async def test_swe_tools_what_does_not_repair_it_earns_nothing(play):
    assert (await play(["I see nothing wrong."])).reward == 0.0
    assert (await play([call("shell", command="ls"), "Done."])).reward == 0.0
    wrong = call("shell", command='sed -i \'s/"-".join/"_".join/\' wordkit/slug.py')
    assert (await play([wrong, call("submit")], {"reward": "share"})).reward == 0.0


async def test_swe_tools_model_that_destroys_its_box_earns_nothing(play):
    assert (await play([call("shell", command="rm -rf /tmp/repo /tmp/.penstock_swe"), "Done."])).reward == 0.0


async def test_swe_tools_broken_task_is_no_reward_of_zero(play, rows):
    with pytest.raises(InfraFailure, match="does not fit its snapshot"):
        await play(REPAIR, row={**rows[0], "test_patch": rows[1]["patch"].replace("part", "trap")})
    with pytest.raises(InfraFailure, match="not a folder"):
        await play(REPAIR, row={**rows[0], "repository": "/nowhere", "base_commit": None})


async def test_swe_tools_another_worker_grades_what_this_one_left(rows):
    sandbox = make_sandbox(SANDBOX, "tests-swe-tools")
    tools = make_tools([ToolConfig(name="swe", timeout_s=300, settings=LIMITS)], sandbox)
    task = Task("eval/0/0", "eval/0", [], "swe", "", extra_info=rows[0])
    first = await tools["shell"].create(task)
    await tools["shell"].execute(first, {"command": "sed -i 's/\"-\".join/sep.join/' wordkit/slug.py"})
    with sharing({}):
        other = [await tools[name].attach(task, first.session_id) for name in ("editor", "submit")]
    seen = await tools["editor"].execute(other[0], {"command": "view", "path": "wordkit/slug.py"})
    assert "return sep.join(words)" in seen.text
    assert [await tools[name].calc_reward(other[0]) for name in ("editor", "submit")] == [1.0, None]
    with pytest.raises(SandboxLost):
        await sandbox.attach(first.session_id)
    await sandbox.close()


async def test_swe_tools_give_back_a_box_without_environment(rows):
    sandbox = make_sandbox(SANDBOX, "tests-swe-tools")
    tools = make_tools([ToolConfig(name="swe", timeout_s=300, settings=LIMITS)], sandbox)
    task = Task("eval/0/0", "eval/0", [], "swe", "", extra_info=rows[0])
    first = await tools["shell"].create(task)
    broken = replace(task, extra_info={**rows[0], "folder": "/proc/nowhere"})
    with pytest.raises(ToolInfraError, match="cannot be made in the box"):
        await tools["editor"].attach(broken, first.session_id)
    with pytest.raises(SandboxLost):
        await sandbox.attach(first.session_id)
    await sandbox.close()


def test_swe_tools_refuse_tools_of_another_box():
    """Whichever the model calls first opens it: a reward would hang on the order of its calls."""
    for names in (["python", "swe"], ["swe", "python"]):
        with pytest.raises(ToolConfigError, match="python in a EpisodeBox"):
            make_tools([ToolConfig(name=name) for name in names], object())


def test_swe_tools_settings_are_checked():
    with pytest.raises(ToolConfigError, match="reward"):
        make_tools([ToolConfig(name="swe", settings={"reward": "much"})], object())


def test_a_recorded_episode_is_not_graded_by_tools() -> None:
    """Its client runs the tools, so a reward of 0 would be made up."""
    assert tool_reward("swe", "", None, {"tool_rewards": {"shell": 1.0}}) == 1.0
    assert tool_reward("swe", "", None, {"tool_rewards": {}}) == 0.0
    with pytest.raises(ValueError, match="its client posts the reward"):
        tool_reward("swe", "", None, {"final_text": "done"})
