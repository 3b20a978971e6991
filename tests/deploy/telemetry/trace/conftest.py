"""A run's folder as the trainer and the recorder leave it: two steps, the second trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BEGAN = 1_700_000_000.0


def line(track: str, name: str, number: int, at_s: float, s: float) -> dict[str, Any]:
    return {"track": track, "name": name, "number": number, "at_unix_s": BEGAN + at_s, "s": s}


def step_lines(number: int, at_s: float) -> list[dict[str, Any]]:
    phases = [("wait", 1.0), ("score", 0.2), ("advantages", 0.1), ("update", 0.5), ("announce", 0.1), ("record", 0.1)]
    made = []
    for name, seconds in phases:
        made.append(line("steps", name, number, at_s, seconds))
        at_s += seconds
    return made


def episode(number: int, at_s: float, worker: str, step: int) -> dict[str, Any]:
    trace = [["model", "", 0.0, 0.3], ["tool", "python", 0.3, 0.2], ["tool", "python", 0.3, 0.1],
             ["model", "", 0.5, 0.2], ["reward", "", 0.7, 0.05]]  # fmt: skip
    return {
        "episode_id": f"train/{number:08d}#0",
        "reward": 1.0,
        "outcome": {"kind": "completed", "reason": "", "component": ""},
        "num_turns": 2,
        "metrics": {"latency_s": 0.8},
        "extra": {"began_unix_s": BEGAN + at_s, "trace": trace, "worker": worker},
        "segments": [],
    }


UPDATES = [
    {"server_id": "rollout-0", "version": v, "pause_s": 0.02, "fetch_s": 0.1, "load_s": 0.01, "in_flight": 3,
     "at_unix_s": BEGAN + 2.5 * v} for v in (1, 2)
]  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    rows = [
        *step_lines(0, 0.0),
        line("publish", "publish", 1, 1.9, 0.4),
        *step_lines(1, 2.1)[:4],  # killed in the middle
        *step_lines(1, 5.0),
        line("checkpoint", "checkpoint", 2, 7.0, 0.6),
        line("evaluation", "evaluation", 1, 2.0, 3.0),
    ]
    write_lines(folder / "timeline.jsonl", rows)
    metrics = [{"step": n, "version": n + 1, "reward": 0.5 + n / 4, "tokens_per_s": 100.0} for n in (0, 1)]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "weight_updates.jsonl", UPDATES)
    write_lines(
        folder / "trajectories" / "step_000000.jsonl", [episode(0, 0.1, "agent-0", 0), episode(1, 0.4, "agent-0", 0)]
    )
    old = {**episode(3, 3.0, "agent-1", 1), "extra": {"worker": "agent-1"}}
    write_lines(folder / "trajectories" / "step_000001.jsonl", [episode(2, 3.0, "agent-1", 1), old])
    return folder
