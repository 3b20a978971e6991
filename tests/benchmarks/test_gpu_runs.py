"""The whole runs of `scripts/gpu-check`, on CPUs with the engine hf, and what their reports find wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.until import until_in_threads

from benchmarks.support import gpu_runs
from benchmarks.support.child import ROOT
from benchmarks.support.gpu_report import main as write_table
from benchmarks.support.gpu_runs import (
    MIB,
    GpuRun,
    MemorySample,
    colocated,
    gsm8k,
    main,
    memory_by_turn,
    memory_watched,
    report_of,
    wrong_turns,
)
from penstock.deploy import RunDir, load_config

MODEL = ROOT / "recipes" / "calculator" / "model"
RUNS = [pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(1500)]
SMALL = ("group_size=4", "groups_per_step=2", "agent.workers=1", "trainer.steps=3", "trainer.checkpoint_every=3")


def turn(at_s: float, side: str, holds: bool, holder: str = "") -> dict[str, Any]:
    return {"at_s": at_s, "side": side, "holder": holder or side, "holds": holds}


TURNS = [
    *(turn(1.0, "engine", True, "a"), turn(2.0, "engine", True, "b"), turn(3.0, "engine", False, "a")),
    *(turn(4.0, "engine", False, "b"), turn(5.0, "trainer", True), turn(8.0, "trainer", False)),
    turn(9.0, "engine", True, "a"),
]
"""Two engines, then the trainer, then an engine once more until the end of the run."""


def in_turns(steps: int = 2) -> GpuRun:
    return colocated("vllm", 1, on_gpu=True, more=[f"trainer.steps={steps}"])


def test_turns_that_overlap_are_wrong_and_so_are_missing_ones() -> None:
    assert list(wrong_turns(in_turns(), TURNS)) == []
    overlapping = sorted([*TURNS, turn(3.5, "trainer", True, "t"), turn(3.6, "trainer", False, "t")], key=at)
    (both,) = wrong_turns(in_turns(), overlapping)
    assert "the trainer held the devices" in both
    (few,) = wrong_turns(in_turns(steps=20), TURNS)
    assert few == "1 turns of the trainer in 20 steps"
    assert len(list(wrong_turns(in_turns(), []))) == 3
    assert list(wrong_turns(gsm8k(MODEL, Path("rows"), in_turns=False, on_gpu=True), [])) == []


def at(row: Mapping[str, Any]) -> float:
    return float(row["at_s"])


def test_memory_is_told_by_the_turn_in_which_it_was_used() -> None:
    samples = [MemorySample(at_s, size) for at_s, size in ((1.5, 7), (3.9, 9), (4.5, 99), (6.0, 5), (7.0, 4))]
    assert memory_by_turn(TURNS, samples) == {"engine": 9, "trainer": 5}
    assert memory_by_turn(TURNS, []) == {}


@pytest.mark.parametrize(("printed", "sizes"), [("1000\\n24\\n", {1024 * MIB}), ("[N/A]\\n", set())])
def test_memory_of_all_gpus_is_watched_if_the_driver_reports_it(
    printed: str, sizes: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_runs, "SAMPLE_S", 0.01)
    with memory_watched() as samples:
        until_in_threads(lambda: bool(samples) or "not watched" in capsys.readouterr().err)
    assert {sample.bytes for sample in samples} == sizes


ROW = {
    **{"wall_s": 2.0, "wait_s": 0.5, "train_s": 1.5, "publish_s": 0.1, "kl_k3": 0.001, "reward": 0.5},
    **{"tokens": 300, "tokens_sampled": 100},
}
SUMMARY = {
    **{"steps": 4, "wall_s": 9.0, "episodes": 32, "episodes_trained": 32, "lost": 0, "trained_twice": 0},
    **{"token_mismatches": 0, "episodes_failed": 0, "staleness_mean": 0.5, "staleness_max": 1, "eval_reward": None},
    **{"logprob_abs_diff_mean": 0.01, "restarts": {"trainer": 0}},
}


def left(folder: Path, **summary: Any) -> RunDir:
    """What a run of four steps left."""
    place = RunDir(folder)
    (place.root / "logs").mkdir(parents=True)
    rows = [{**ROW, "step": step, "mfu": [0.01, 0.3, 0.3, 0.6][step], "reward": step / 4} for step in range(4)]
    place.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.weight_updates.write_text("".join(json.dumps({"pause_s": pause}) + "\n" for pause in (0.1, 0.3)))
    place.turns.write_text("".join(json.dumps(one) + "\n" for one in TURNS))
    place.summary.write_text(json.dumps(SUMMARY | summary))
    return place


def test_the_report_of_a_run(tmp_path: Path) -> None:
    report = report_of(in_turns(4), left(tmp_path / "run"), [MemorySample(6.0, 5)])
    figures = report["figures"]
    assert (report["wrong"], report["dtype"]) == (["1 turns of the trainer in 4 steps"], "bfloat16")
    assert figures["mfu_mean"] == pytest.approx(0.4), "without the first step, which compiles"
    assert (figures["pause_s_mean"], figures["pause_s_max"]) == (pytest.approx(0.2), 0.3)
    assert (figures["trainer_tokens_per_s"], figures["rollout_tokens_per_s"]) == (200.0, 50.0)
    assert (figures["reward_first_3"], figures["reward_last_3"]) == ([0.0, 0.25, 0.5], [0.25, 0.5, 0.75])
    assert (figures["turns"], figures["device_bytes"]) == ({"engine": 2, "trainer": 1}, {"trainer": 5})


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"steps": 3}, "3 of 4 steps"),
        ({"lost": 1}, "lost is 1"),
        ({"trained_twice": 2}, "trained_twice is 2"),
        ({"token_mismatches": 1}, "token_mismatches is 1"),
        ({"restarts": {"trainer": 0, "rollout-0": 2}}, "rollout-0"),
        ({"logprob_abs_diff_mean": 0.2}, "logprob_abs_diff_mean is 0.2"),
        ({"logprob_abs_diff_mean": None}, "logprob_abs_diff_mean is None"),
        ({"logprob_abs_diff_mean": float("nan")}, "logprob_abs_diff_mean is nan"),
    ],
)
def test_accounts_that_do_not_balance_are_wrong(summary: dict[str, Any], text: str, tmp_path: Path) -> None:
    wrong = report_of(in_turns(4), left(tmp_path / "run", **summary), [])["wrong"]
    assert any(text in one for one in wrong), wrong


def test_ranks_that_did_not_meet_over_nccl_are_wrong(tmp_path: Path) -> None:
    place, run = left(tmp_path / "run"), gpu_runs.ranks(on_gpu=True, more=["trainer.steps=4"])
    assert "NCCL" in report_of(run, place, [])["wrong"][0]
    (place.root / "logs" / "trainer.log").write_text("host:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n")
    assert report_of(run, place, [])["wrong"] == []


@pytest.mark.parametrize("run", [in_turns(), colocated("sglang", 2, on_gpu=True), gpu_runs.ranks(on_gpu=True)])
def test_the_runs_are_recipes_that_load(run: GpuRun) -> None:
    config = load_config(run.recipe, list(run.overrides))
    assert config.trainer.steps == run.steps
    assert config.trainer.dtype == run.dtype == "bfloat16"
    shares = {**config.rollout.vllm_args, **config.rollout.sglang_args}
    assert list(shares.values()) == ([] if run.name == "ranks" else [gpu_runs.SHARE])


def test_rows_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"train\.jsonl: no such file"):
        main(["gsm8k", str(tmp_path), "--model", str(MODEL), "--data", str(tmp_path)])


def report_written(folder: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"run-{name}.json").read_text())
    assert report["wrong"] == []
    return report


@pytest.mark.deep
class TestRuns:
    """On this machine."""

    pytestmark = RUNS

    @pytest.mark.parametrize("level", [1, 2])
    def test_colocated(self, level: int, tmp_path: Path) -> None:
        main(["colocated", str(tmp_path), "--level", str(level), *SMALL])
        figures = report_written(tmp_path, f"colocated-hf-{level}")["figures"]
        assert figures["turns"]["trainer"] >= 2
        assert figures["rollout_tokens_per_s"] > 0

    def test_ranks(self, tmp_path: Path) -> None:
        main(["ranks", str(tmp_path), *SMALL])
        report_written(tmp_path, "ranks")

    def test_gsm8k(self, tmp_path: Path) -> None:
        """Rows of GSM8K's form; the small model answers none of them right."""
        (tmp_path / "rows").mkdir()
        row = {"question": "Ann has 3 pens and buys 2 more. How many?", "answer": "3+2=<<3+2=5>>5 pens\n#### 5"}
        for split in ("train", "test"):
            (tmp_path / "rows" / f"{split}.jsonl").write_text(32 * (json.dumps(row) + "\n"))
        own = ("rollout.engine=hf", "rollout.vllm_args={}", "rollout.dtype=float32", "trainer.dtype=float32")
        lengths = ("agent.max_new_tokens=40", "agent.max_response_tokens=160", "rollout.max_model_len=512")
        words = (*SMALL, *own, *lengths, "data.eval_limit=4", "sandbox.run_timeout_s=60", "agent.concurrency=16")
        main(["gsm8k", str(tmp_path), "--model", str(MODEL), "--data", str(tmp_path / "rows"), *words])
        figures = report_written(tmp_path, "gsm8k")["figures"]
        assert figures["steps"] == 3
        assert figures["turns"]["trainer"] >= 2
        write_table(tmp_path)
        assert "| run-gsm8k: turns | engine" in (tmp_path / "table.md").read_text()
