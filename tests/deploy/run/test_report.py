"""The reporter next to a failing disk, and the summary of a run's folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE
from tests.until import until

from penstock.agent_loops import BLOCKING
from penstock.common import cancel_and_wait
from penstock.dashboard import whole_letter
from penstock.deploy import RunConfig, RunDir, limits_of, load_config
from penstock.deploy.commands.run import _nothing_left
from penstock.deploy.run.report import Reporter
from penstock.deploy.run.summary import describe_end, write_summary
from penstock.deploy.run_dir import LivesFile, LivesTotal
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import DeadLetter, Outcome, OutcomeKind, WeightUpdate


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(RECIPE, [f"runs_dir={tmp_path}", "name=mine"])


@pytest.fixture
async def queue(config: RunConfig) -> MemoryTransferQueue:
    queue = MemoryTransferQueue()
    await queue.create_run(limits_of(config), "")
    return queue


async def test_a_disk_that_fails_ends_no_run(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.of(config)  # its folder does not exist: every write fails, as on a full disk
    reporter = Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives))
    output = ""

    def is_reported() -> bool:
        nonlocal output
        output += capsys.readouterr().err
        return output.count("run mine:") == 1 and "not recorded" in output

    reporting = asyncio.create_task(reporter.run())
    await until(is_reported)
    await asyncio.sleep(1.5)  # the reporter looks again, and reports nothing new
    run.root.mkdir()
    await until(run.lives.exists)
    assert not reporting.done()
    output += capsys.readouterr().err
    assert output.count("not recorded") == 1
    assert "lives.json" in output
    assert [life["restarts"] for life in json.loads(run.lives.read_text())] == [{}]
    await cancel_and_wait([reporting])
    reporter.close()


def test_a_reader_of_standard_error_that_leaves_ends_no_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as tee does, which the Ctrl-C of a run ends too
    run = RunDir.of(config)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives)).close()


async def test_a_resumed_run_reports_new_steps_only(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.of(config)
    write_lines(run.metrics, [full_step(0), full_step(1)])
    reporter = Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives), summary="run id")
    write_lines(run.metrics, [full_step(0), full_step(1), full_step(2)])
    reporter._report(None)
    write_lines(run.metrics, [full_step(number) for number in range(4)])  # the step at Ctrl-C
    reporter.close()
    printed = capsys.readouterr().err
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("  step")] == ["3/50", "4/50"]


async def test_evaluations_are_reported(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.of(config)
    earlier = {"version": 10, "reward": 0.5, "episodes": 8, "failed": 0}
    write_lines(run.evaluations, [earlier])
    reporter = Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives), summary="run id")
    write_lines(run.evaluations, [earlier, {"version": 20, "reward": 0.75, "episodes": 6, "failed": 2}])
    for _ in range(2):
        reporter._report(None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "  evaluation" in line]
    assert lines == ["  evaluation after step 20: reward 0.750 over 6 episodes; 2 more failed"]


async def test_failures_of_an_earlier_life_warn_no_more(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.of(config)
    failing = [{**full_step(number), "episodes": 8, "attempts_failed": 8} for number in range(4)]
    write_lines(run.metrics, failing)
    reporter = Reporter(config, run, MemoryTransferQueue(), [], LivesFile(run.lives), summary="run id")
    write_lines(run.metrics, [*failing, {**full_step(4), "episodes": 8}])
    reporter._report(None)
    assert "failed lately" not in capsys.readouterr().err


async def test_blocking_user_code_is_reported_once(
    config: RunConfig, queue: MemoryTransferQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await queue.add_wait("agent", f"{BLOCKING}/mine/my_tool.py:12 in call", 0.4)
    await queue.add_wait("agent", "server", 1.0)
    run = RunDir.of(config)
    reporter = Reporter(config, run, queue, [], LivesFile(run.lives))
    for _ in range(2):
        reporter._report(await queue.status())
    warnings = [line for line in capsys.readouterr().err.splitlines() if "blocks every episode" in line]
    assert [line.split()[:3] for line in warnings] == [["/mine/my_tool.py:12", "in", "call"]]


async def test_causes_of_failed_episodes_are_reported_once(
    config: RunConfig, queue: MemoryTransferQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.of(config)
    reporter = Reporter(config, run, queue, [], LivesFile(run.lives))
    resumed = Reporter(config, run, queue, [], LivesFile(run.lives), summary="run id")
    resumed._report(replace(await queue.status(), failures={"tool: an earlier life's": 1}))
    for count in (1, 2):
        reporter._report(replace(await queue.status(), failures={"sandbox: no box is free": count}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "tried again" in line]
    assert lines == ["  an episode failed and is tried again: sandbox: no box is free"]


async def test_a_step_without_episodes_is_in_no_mean(
    config: RunConfig, queue: MemoryTransferQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.of(config)
    reporter = Reporter(config, run, queue, [], LivesFile(run.lives))
    nothing = {**step(1, 0, None), **full_step(1), "reward": 0.0, "episodes": 0}
    write_lines(run.metrics, [{**step(0, 30, 0.1), **full_step(0)}, nothing])
    reporter._report(None)
    assert "step   2/50  no episode could be trained on" in capsys.readouterr().err
    summary = await write_summary(config, run, queue, LivesTotal(1, 1.0, {}))
    assert (summary["reward_first"], summary["reward_last"]) == (1.0, 1.0)


def full_step(number: int) -> dict[str, Any]:
    names = ("reward", "staleness_mean", "staleness_max", "tokens_sampled", "train_s", "wait_s", "episodes")
    return {"step": number, **dict.fromkeys(names, 1)}


def test_a_finished_run_has_nothing_left(config: RunConfig) -> None:
    run = RunDir.of(config)
    assert _nothing_left(config) == ""
    run.root.mkdir()
    for steps, ended, left in (
        (50, "all 50 steps are trained", False),
        (40, "all 40 steps are trained", True),
        (50, "trainer stopped the run", True),
    ):
        run.summary.write_text(json.dumps({"steps": steps, "ended": ended}))
        assert bool(_nothing_left(config)) is not left


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], rest: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + rest)


def step(number: int, tokens: int, mean: float | None) -> dict[str, Any]:
    """One line of metrics.jsonl, of four episodes of which one call each was resumed."""
    learned = {"reward": 0.25 * number, "staleness_max": number, "staleness_mean": 0.5 * number}
    exact = {f"logprob_abs_diff_{name}": value for name, value in (("tokens", tokens), ("mean", mean), ("max", mean))}
    return {"step": number, "episodes": 4, "tokens_sampled": 10, "episode/calls_resumed": 0.25, **learned, **exact}


async def test_the_summary_counts_a_replayed_step_once(config: RunConfig, queue: MemoryTransferQueue) -> None:
    run = RunDir.of(config)
    rows = [step(0, 30, 0.1), step(1, 7, 0.9), step(1, 10, 0.5), step(2, 0, None)]
    write_lines(run.metrics, rows, '{"step": 3, "rew')
    for version in (1, 2, 3):
        await queue.report_update(WeightUpdate("s", version, 0.01 * version, fetch_s=0, load_s=0, in_flight=3))
    summary = await write_summary(config, run, queue, LivesTotal(2, 101.04, {"trainer": 3}))
    assert summary == json.loads(run.summary.read_text())
    assert (summary["steps"], summary["lives"], summary["wall_s"], summary["restarts"]) == (3, 2, 101.0, {"trainer": 3})
    assert (summary["reward_first"], summary["staleness_max"], summary["staleness_mean"]) == (0.0, 2, 0.5)
    assert (summary["tokens_sampled"], summary["requests_resumed"]) == (30, 3)
    assert summary["logprob_abs_diff_mean"] == pytest.approx(0.2), "weighted by tokens"
    assert summary["logprob_abs_diff_max"] == 0.5
    assert (summary["weight_updates"], summary["requests_in_flight_at_updates"]) == (3, 9)
    assert summary["pause_ms_p50"] == 20.0
    assert run.plot.exists()


@pytest.mark.parametrize(
    ("steps", "completed", "dropped", "held", "lost", "twice", "still_held"),
    [(["ab", "c"], 6, 1, "cde", 0, 0, 2), (["ab", "a"], 4, 0, "", 2, 1, 0)],
)
async def test_the_accounts_of_a_run_name_lost_and_repeated_episodes(
    config: RunConfig, queue: MemoryTransferQueue, monkeypatch: pytest.MonkeyPatch, steps: list[str],
    completed: int, dropped: int, held: str, lost: int, twice: int, still_held: int,
) -> None:  # fmt: skip
    async def held_episodes() -> set[str]:
        return set(held)

    monkeypatch.setattr(queue, "held", held_episodes)
    queue._state.counts.update(completed=completed, dropped=dropped)
    run = RunDir.of(config)
    write_lines(run.steps, [{"step": number, "episodes": list(episodes)} for number, episodes in enumerate(steps)])
    summary = await write_summary(config, run, queue, LivesTotal(1, 1.0, {}))
    assert (summary["lost"], summary["trained_twice"], summary["episodes_held"]) == (lost, twice, still_held)
    (line,) = [line for line in describe_end(summary, run).splitlines() if line.startswith("  episodes")]
    balanced = not lost and not twice
    assert ("none lost" in line, f"{lost} lost" in line, f"{twice} trained twice" in line) == (
        balanced,
        bool(lost),
        bool(twice),
    )


async def test_the_end_of_a_run_names_servers_that_failed_for_good(
    config: RunConfig, queue: MemoryTransferQueue
) -> None:
    run = RunDir.of(config)
    run.root.mkdir(parents=True)
    restarts = {"rollout-0": 0, "rollout-1": 5}
    summary = await write_summary(config, run, queue, LivesTotal(1, 1.0, restarts), ["rollout-1"])
    assert summary["roles_failed"] == ["rollout-1"]
    assert [line for line in describe_end(summary, run).splitlines() if "failed" in line and "rollout-1" in line]


async def test_updates_that_a_checkpoint_took_along_are_not_counted_as_trained(
    config: RunConfig, queue: MemoryTransferQueue
) -> None:
    run = RunDir.of(config)
    queue._state.counts.update(completed=3)
    steps = [{"step": 0, "episodes": ["a"]}, {"step": 1, "episodes": ["b", "c"], "update_lost": True}]
    write_lines(run.steps, steps)
    summary = await write_summary(config, run, queue, LivesTotal(1, 1.0, {}))
    assert (summary["episodes_trained"], summary["episodes_update_lost"], summary["lost"]) == (1, 2, 0)
    assert "1 trained, 2 update lost with a checkpoint; none lost" in describe_end(summary, run)
    shown = describe_end({**summary, "accounts": {"tokens": {"trained": 9.0, "filtered": 1.0}}}, run)
    assert "of trained episodes, at most 0 versions old; of all, 90.0% trained, 10.0% filtered" in shown


async def test_dead_letters_stay_when_the_queue_ends(
    config: RunConfig, queue: MemoryTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(OutcomeKind.INFRA_ERROR, "the box is gone", "sandbox")
    letter = DeadLetter("train/0#1", outcome, attempts=3)

    async def dead_letters(limit: int = 100, start: int = 0) -> list[DeadLetter]:
        return [letter]

    monkeypatch.setattr(queue, "dead_letters", dead_letters)
    run = RunDir.of(config)
    run.root.mkdir(parents=True)
    await write_summary(config, run, queue, LivesTotal(1, 1.0, {}))
    assert [json.loads(line) for line in run.dead_letters.read_text().splitlines()] == [whole_letter(letter, None)]


def test_lives_are_summed_without_the_time_between_them(tmp_path: Path) -> None:
    now, path = 1000.0, tmp_path / "lives.json"
    killed = LivesFile(path, lambda: now)
    now += 70
    killed.write({"trainer": 2, "agent-0": 0})  # and then its supervisor is killed
    now += 500
    last = LivesFile(path, lambda: now)
    now += 1
    last.write({"trainer": 1})  # counts from its first seconds on
    assert LivesFile(path, lambda: now).total({}).lives == 3
    now += 30
    total = last.total({"trainer": 1, "rollout-0": 3})
    assert (total.lives, total.wall_s) == (2, 101.0)
    assert total.restarts == {"trainer": 3, "agent-0": 0, "rollout-0": 3}
    path.write_text('[{"wall_s": 1')
    assert LivesFile(path).total({}).lives == 1, "a damaged file is an empty one"
