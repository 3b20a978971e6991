"""Trajectories as the trainer's recorder writes them, made of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

WRITES, LOOKS = {"Authorization": "Bearer writes"}, {"Authorization": "Bearer looks"}
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6*7)"}}\n</tool_call>'
ANSWER = "\n<tool_response>\n42\n</tool_response>\n"


def said(text: str, version: int = 0, logprob: float = -0.5) -> dict[str, Any]:
    """A sampled run, a token per word."""
    pieces = [piece for word in text.split(" ") for piece in (word, " ")][:-1]
    ends = list(accumulate(map(len, pieces)))
    logprobs = [logprob * (1 + i % 3) for i in range(len(pieces))]
    versions = [[version, len(pieces)]]
    return {"mask": 1, "tokens": len(pieces), "text": text, "ends": ends, "versions": versions, "logprobs": logprobs}


def told(text: str) -> dict[str, Any]:
    return {"mask": 0, "tokens": 1, "text": text, "ends": [len(text)]}


def record(episode: str, runs: Sequence[Mapping[str, Any]], reward: float | None = 1.0, **extra: Any) -> dict[str, Any]:
    kind = extra.pop("kind", "completed")
    return {
        "episode_id": episode,
        "reward": reward,
        "advantage": 0.5,
        "outcome": {"kind": kind, "reason": "", "component": ""},
        "num_turns": sum(run["mask"] for run in runs),
        "data_source": "test",
        "metrics": {"latency_s": 1.5, "tool_calls": 1.0},
        "extra": {"agent": "Loop", "trace": [["model", "", 0.0, 1.0], ["tool", "python", 1.0, 0.25]], **extra},
        "segments": [{"prompt": "What is 6*7?", "prompt_tokens": 5, "runs": list(runs)}],
    }


def write_step(run: Path, step: int, records: Sequence[Mapping[str, Any]]) -> Path:
    folder = run / "trajectories"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def write_rows(run: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(run: Path, text: str = "{}") -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(text)
