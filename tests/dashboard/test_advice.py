"""Who waits, in words and as a split of devices."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.dashboard.recorded import write_config, write_rows

from penstock.dashboard import advise, flat_rewards
from penstock.dashboard.metrics import Devices


def rows(wait_s: float, steps: int = 5) -> list[dict[str, float]]:
    """The first step waits for everything to start; it must not count."""
    return [{"wall_s": 100.0, "wait_s": 99.0}] + [{"wall_s": 10.0, "wait_s": wait_s}] * steps


def test_a_trainer_that_waits_half_of_the_time_wants_twice_the_rollouts() -> None:
    split = advise(rows(5.0), 0.0, Devices(rollout=4, trainer=4))
    assert split.bubble == pytest.approx(0.5)
    # R·n_r = 10·4, T·n_t = 5·4
    assert split.rollout_share == pytest.approx(40 / 60)
    assert "2.0 times the rollout capacity" in split.advice
    assert "5 for rollouts, 3 for training" in split.advice


def test_rollouts_that_are_held_back_give_devices_away() -> None:
    split = advise(rows(0.0), 0.5, Devices(rollout=4, trainer=4))
    assert split.rollout_share == pytest.approx(20 / 60)
    assert "3 for rollouts, 5 for training" in split.advice


def test_two_devices_cannot_be_split_otherwise() -> None:
    assert "with the same" not in advise(rows(5.0), 0.0, Devices(1, 1)).advice


@pytest.mark.parametrize(
    ("wait_s", "idle", "words"),
    [(0.5, 0.05, "balanced"), (5.0, 0.5, "lock-step"), (0.5, None, "balanced"), (9.9999, None, "trainer waits 100%")],
)
def test_in_words(wait_s: float, idle: float | None, words: str) -> None:
    assert words in advise(rows(wait_s), idle, Devices(1, 1)).advice


def test_nothing_is_said_before_the_second_step() -> None:
    assert advise(rows(0.0, steps=0), None, Devices(1, 1)).advice == "No step to judge by yet."


async def test_a_run_that_ended_is_judged_by_its_summary(page: httpx.AsyncClient, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    write_config(run, "rollout: {servers: 6}\ntrainer: {ranks: 2}\nagent: {workers: 2}\n")
    write_rows(run, [{"step": step, **one} for step, one in enumerate(rows(0.0))])
    (run / "summary.json").write_text(json.dumps({"wall_s": 100.0, "wait_s": {"agent:admission": 100.0}}))
    told = (await page.get("/api/runs/mine/split")).json()
    assert (told["rollout_idle"], told["rollout_share"]) == (0.5, pytest.approx(3 / 5))


async def test_overview_of_an_ended_run(page: httpx.AsyncClient, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    write_config(run, "agent: {workers: 2}\n")
    assert (await page.get("/api/runs/mine/end")).json() == {"ended": None, "summary": {}}
    (run / "ended.json").write_text('{"version": 3, "why": "all steps are done"}')
    (run / "summary.json").write_text('{"steps": 3, "reward_last": 0.5}')
    told = (await page.get("/api/runs/mine/end")).json()
    assert told == {"ended": "all steps are done", "summary": {"steps": 3, "reward_last": 0.5}}


def flat_rows(reward: float, steps: int, **faults: int) -> list[dict]:
    return [{"reward": reward, "reward_std": 0.0, "episodes": 8, "faults": faults} for _ in range(steps)]


def test_rewards_all_zero_name_the_commonest_cause() -> None:
    said = flat_rewards(flat_rows(0.0, 4, **{"every call malformed": 6, "truncated (length)": 1}))
    assert "last 4 steps are 0" in said
    assert "every call malformed (24 of 32 episodes)" in said


def test_rewards_equal_without_a_fault_point_to_the_reward() -> None:
    assert "equal" in flat_rewards(flat_rows(1.0, 3))
    assert "No episode had a fault" in flat_rewards(flat_rows(1.0, 3))


def test_rewards_that_differ_need_no_warning() -> None:
    differ = [{"reward": 0.5, "reward_std": 0.5, "episodes": 8}]
    assert flat_rewards([*flat_rows(0.0, 9), *differ]) == ""
    assert flat_rewards(flat_rows(0.0, 2)) == ""
