"""Who waits, in words and as a split of devices; and rewards that teach nothing."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.dashboard.recorded import write_config, write_rows

from penstock.dashboard import advise, reward_warning
from penstock.dashboard.metrics import Devices


def rows(wait_s: float, steps: int = 5) -> list[dict[str, float]]:
    """The first step waits for everything to start; it must not count."""
    return [{"wall_s": 100.0, "wait_s": 99.0}] + [{"wall_s": 10.0, "wait_s": wait_s}] * steps


@pytest.mark.parametrize(
    ("wait_s", "idle", "devices", "share", "words"),
    [
        (5.0, 0.0, 4, 40 / 60, ["2.0 times the rollout capacity", "5 for rollouts, 3 for training"]),
        (0.0, 0.5, 4, 20 / 60, ["3 for rollouts, 5 for training"]),
        (0.5, 0.05, 1, None, ["balanced"]),
        (5.0, 0.5, 1, None, ["lock-step"]),
        (0.5, None, 1, None, ["balanced"]),
        (9.9999, None, 1, None, ["trainer waits 100%"]),
    ],
)
def test_the_split_follows_who_waits(
    wait_s: float, idle: float | None, devices: int, share: float | None, words: list[str]
) -> None:
    split = advise(rows(wait_s), idle, Devices(rollout=devices, trainer=devices))
    assert split.bubble == pytest.approx(wait_s / 10)
    assert [word for word in words if word not in split.advice] == []
    if share is not None:
        assert split.rollout_share == pytest.approx(share)


def test_no_split_without_devices_or_steps_to_judge_by() -> None:
    assert "devices" not in advise(rows(5.0), 0.0, Devices(1, 1)).advice
    assert advise(rows(0.0, steps=0), None, Devices(1, 1)).advice == "No step to judge by yet."


async def test_a_run_that_ended_is_judged_by_its_summary(page: httpx.AsyncClient, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    write_config(run, "rollout: {servers: 6}\ntrainer: {ranks: 2}\nagent: {workers: 2}\n")
    write_rows(run, [{"step": step, **one} for step, one in enumerate(rows(0.0))])
    assert (await page.get("/api/runs/mine/end")).json() == {"ended": None, "failed": False, "summary": {}}
    summary = {"wall_s": 100.0, "wait_s": {"agent:admission": 100.0}}
    (run / "ended.json").write_text('{"version": 3, "why": "all steps are done"}')
    (run / "summary.json").write_text(json.dumps(summary))
    split = (await page.get("/api/runs/mine/split")).json()
    assert (split["rollout_idle"], split["rollout_share"]) == (0.5, pytest.approx(3 / 5))
    end = {"ended": "all steps are done", "failed": False, "summary": summary}
    assert (await page.get("/api/runs/mine/end")).json() == end
    (run / "ended.json").write_text('{"version": 3, "why": "no progress for 9 s", "failed": true}')
    assert (await page.get("/api/runs/mine/end")).json() == {**end, "ended": "no progress for 9 s", "failed": True}


FAULTS = {"malformed calls": 6, "truncated (length)": 1}

ENV = "environment: step 1 raised KeyError: 'treasure'"


def step(reward: float = 0.0, std: float = 0.0, **faults: int) -> dict[str, object]:
    return {"reward": reward, "reward_std": std, "episodes": 8, "faults": faults}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([step(**FAULTS)] * 4, ["last 4 steps are 0", "malformed calls (24 of 32 episodes)"]),
        (
            [step(0.28, 0.4)] * 8 + [step(**FAULTS)] * 3,
            ["last 3 steps are 0", "0.28 before", "a lower trainer.lr", "fault: malformed calls"],
        ),
        ([step(1.0)] * 3, ["equal", "No episode had a fault"]),
        (
            [step()] * 3 + [step(**{"truncated (length)": 1})],
            ["truncated (length): 1 of 32 episodes) is too rare to be the cause", "reward compares"],
        ),
        ([step(**{"stock answered with an error": 7})] * 3, ["21 of 24 episodes); traj", "show its texts"]),
        (
            [step(**{"truncated (turns)": 8})] * 3,
            ["Look at what the reward compares", "24 of 24 are truncated (turns)"],
        ),
        ([step(0.28, 0.4)] * 8 + [step(0.03, 0.1)] * 6, ["fell from 0.28 to 0.03", "a lower trainer.lr"]),
        ([step(0.28, 0.4), step(0.2, 0.4)] * 8, []),
        ([*[step()] * 9, step(0.5, 0.5)], []),
        ([step()] * 2, []),
        (
            [step(0.5, 0.5, **FAULTS), step(0.5, 0.5, **{ENV: 2}) | {"attempts_failed": 2}],
            ["2 of 18 attempts at episodes failed", f"{ENV} (2)"],
        ),
        ([step(0.5, 0.5)] * 4 + [step(0.5, 0.5, **{ENV: 2}) | {"attempts_failed": 2}], []),
    ],
)
def test_equal_and_falling_rewards_are_reported(steps: list[dict[str, object]], words: list[str]) -> None:
    warning = reward_warning(steps)
    assert bool(warning) == bool(words)
    assert [word for word in words if word not in warning] == []
