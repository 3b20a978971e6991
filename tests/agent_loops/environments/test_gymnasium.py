"""Environments in processes of their own: shapes, state per episode, seeds, failures, ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.agent_loops.environments.conftest import Play
from tests.agent_loops.environments.envs import Silent
from tests.agent_loops.loops.conftest import check_fed
from tests.until import until

from penstock.agent_loops import InfraFailure
from penstock.agent_loops.base import SharedParts
from penstock.agent_loops.environments.gymnasium import EnvironmentHost
from penstock.agent_loops.environments.settings import GymnasiumSettings
from penstock.transfer_queue import OutcomeKind

FILE = Path(__file__).with_name("envs.py")


def settings(name: str, **more: object) -> dict[str, object]:
    return {"env": f"{FILE}:{name}", **more}


async def test_an_episode_in_gymnasiums_shape(play: Play, chat_for) -> None:
    given = settings("Corridor", options={"goal": 3}, state="key", show=["at"])
    played = await play("gymnasium", ["right", "left", "right"], given, {"seed": 4, "env": {"goal": 2}})
    done = played.done
    assert done.turn_rewards == pytest.approx((-0.1, -0.1, 0.9))
    assert done.reward == pytest.approx(0.7)
    assert (done.outcome.kind, done.metrics["env/at"], done.metrics["env/steps"]) == (OutcomeKind.COMPLETED, 2.0, 3.0)
    states = done.extra["turn_states"]
    assert states[1] == states[2] != states[0]
    assert "at 1 of 2\nat: 1" in chat_for().decode(played.prompts[1])
    check_fed(played.client, done)


async def test_episodes_share_nothing_and_follow_their_seeds(play: Play) -> None:
    given = settings("Corridor", options={"goal": 1}, show=["made", "pid", "drawn"])
    said = []

    def says(context: str) -> str:
        said.append(context.partition("made:")[2].split())
        return "right"

    for seed in (1, 2, 1):
        played = await play("gymnasium", says, given, {"seed": seed})
        assert played.done.metrics["env/made"] == 1.0
    pids, drawn = [line[2] for line in said], [line[4] for line in said]
    assert len(set(pids)) == 3
    assert drawn[0] == drawn[2] != drawn[1]


async def test_state_is_named_where_observations_carry_noise(play: Play) -> None:
    given = settings("Corridor", options={"goal": 2, "noise": True}, state="key")
    played = await play("gymnasium", ["left", "left", "right"], given)
    assert len(set(played.done.extra["turn_states"])) == 2


async def test_the_old_shape_with_numbered_actions(play: Play, chat_for) -> None:
    played = await play("gymnasium", ["1", "up", "2"], settings("Old"), {"seed": 9})
    assert played.done.turn_rewards == (1.0, 0.0, 2.0)
    assert "a number from 0 to 2" in chat_for().decode(played.prompts[2])
    named = await play("gymnasium", ["Stop"], settings("Old", actions=["left", "right", "stop"]), {"seed": 9})
    assert (named.done.reward, named.done.num_turns) == (2.0, 1)


async def test_textworlds_shape_with_a_score_so_far(play: Play, chat_for) -> None:
    played = await play("gymnasium", ["go"], settings("Scores", rewards="total", show=["admissible_commands"]))
    assert (played.done.turn_rewards, played.done.metrics["env/won"]) == ((2.0, 2.0), 1.0)
    assert "A room.\nadmissible_commands: look, go" in chat_for().decode(played.prompts[0])


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("raises", "ValueError: the door is stuck"),
        ("dies", "SIGSEGV"),
        ("exits", "3"),
        ("leaves", "SystemExit: enough"),
    ],
)
async def test_an_environment_that_fails_is_a_typed_failure(play: Play, where: str, how: str, named: str) -> None:
    played = await play("gymnasium", ["right"], settings("Broken", options={"where": where, "how": how}))
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    assert named in played.outcome.reason
    assert where in played.outcome.reason
    assert played.trajectory is None
    after = await play("gymnasium", ["right"], settings("Broken", options={"where": "nowhere"}))
    assert after.done.num_turns == 3


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("reset", r"reset\(\) returned None"),
        ("step", r"step\(\) returned None"),
        ("text", "the reward 'right', not"),
        ("nan", "the reward nan, not"),
    ],
)
async def test_what_an_environment_should_not_return_names_its_file_and_line(
    play: Play, where: str, named: str
) -> None:
    played = await play("gymnasium", ["right"], settings("Silent", options={"where": where}))
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    line = (Silent.reset if where == "reset" else Silent.step).__code__.co_firstlineno
    assert re.search(rf"{named}.*\({FILE}, line {line}\)$", played.outcome.reason), played.outcome


@pytest.mark.parametrize(("where", "how"), [("reset", "hangs"), ("step", "hangs"), ("step", "spins")])
async def test_an_environment_that_never_answers_is_ended_with_all_it_started(
    play: Play, tmp_path: Path, where: str, how: str
) -> None:
    file = tmp_path / "pids"
    options = {"where": where, "how": how, "pid_file": "" if how == "spins" else str(file)}
    limit, seconds = {
        ("reset", "hangs"): ("start_timeout_s", 30.0),
        ("step", "hangs"): ("step_timeout_s", 10.0),
        ("step", "spins"): ("step_timeout_s", 0.5),
    }[where, how]
    given = settings("Broken", options=options, **{limit: seconds})
    played = await play("gymnasium", ["right"], given)
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    assert limit in played.outcome.reason
    if how == "hangs":
        await until(lambda: all(_gone(int(pid)) for pid in file.read_text().split()))


async def test_an_episode_that_ends_well_leaves_no_process(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    played = await play("gymnasium", ["right"], settings("Starts", options={"pid_file": str(file)}))
    assert played.outcome.kind == OutcomeKind.COMPLETED
    await until(lambda: all(_gone(int(pid)) for pid in file.read_text().split()))


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


async def test_an_observation_that_floods_is_cut(play: Play) -> None:
    played = await play("gymnasium", ["right"], settings("Floods"), max_turns=2, max_response_tokens=100_000)
    assert played.done.num_turns == 2


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ("no_such_package_at_all:Env", "no_such_package_at_all"),
        (f"{FILE}:Nothing", "Nothing"),
        ("missing/file.py:Env", "missing/file.py"),
        (f"{FILE}:raises_when_made", "no maze"),
        ("", "agent.settings.env"),
    ],
)
async def test_an_environment_that_cannot_be_made_is_named(play: Play, env: str, named: str) -> None:
    played = await play("gymnasium", ["right"], {"env": env})
    assert played.outcome.kind == OutcomeKind.INFRA_ERROR
    assert named in played.outcome.reason


async def test_a_host_that_was_killed_is_started_again(play: Play, shared: SharedParts) -> None:
    await play("gymnasium", ["right"], settings("Corridor"))
    (host,) = shared._parts.values()
    assert isinstance(host, EnvironmentHost)
    first = host._process
    assert first is not None
    os.killpg(first.pid, signal.SIGKILL)
    await until(lambda: host._control is None)
    played = await play("gymnasium", ["right"], settings("Corridor"))
    assert played.done.num_turns == 3
    assert host._process is not first


WORKER = """
import asyncio, os, sys, uvloop
from penstock.agent_loops.environments.gymnasium import EnvironmentHost
from penstock.agent_loops.environments.settings import GymnasiumSettings

async def main():
    host = EnvironmentHost(sys.argv[1], ())
    environment = await host.open({}, GymnasiumSettings(env="x"))
    first = await environment.reset(1)
    print(host._process.pid, int(first.numbers["pid"]), flush=True)
    await environment.step("right")
    await asyncio.Event().wait()

uvloop.new_event_loop().run_until_complete(main())
"""


async def test_nothing_is_left_of_a_worker_that_is_killed() -> None:
    """On the event loop that a run's workers have."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, f"{FILE}:Corridor"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(FILE.parents[3] / "src")},
    )
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(60):
            pids = [int(pid) for pid in (await worker.stdout.readline()).split()]
    finally:
        worker.kill()
        await worker.wait()
    assert len(pids) == 2
    await until(lambda: all(map(_gone, pids)))


async def test_nothing_is_left_when_the_worker_closes() -> None:
    host = EnvironmentHost(f"{FILE}:Corridor", ())
    given = GymnasiumSettings(env="x")
    environments = await asyncio.gather(*[host.open({}, given) for _ in range(3)])
    first = await environments[0].reset(1)
    pids = [int(first.numbers["pid"])]
    assert host._process is not None
    pids.append(host._process.pid)
    await host.close()
    await until(lambda: all(map(_gone, pids)))
    with pytest.raises(InfraFailure):
        await environments[0].step("right")
