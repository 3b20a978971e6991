"""The trainer's benchmark: all sides train the same thing, and ratios are those of the figures beside them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import pytest

from benchmarks.support.child import ROOT
from benchmarks.support.work import Work, log_normal_lengths

Measure = Callable[..., Awaitable[dict[str, Any]]]
TRL = ROOT / ".venv-trl"
TINY = {
    "PENSTOCK_BENCH_ROUNDS": "2",
    "PENSTOCK_BENCH_MODEL": "tiny",
    "PENSTOCK_BENCH_ROWS": "8",
    "PENSTOCK_BENCH_MEAN_TOKENS": "40",
    "PENSTOCK_BENCH_MICRO_ROWS": "4",
    "PENSTOCK_BENCH_MICRO_TOKENS": "256",
}


def test_lengths_are_log_normal_and_the_same_every_time() -> None:
    lengths = log_normal_lengths(1000, mean=200, sigma=1.0, longest=100_000)
    assert lengths == log_normal_lengths(1000, mean=200, sigma=1.0, longest=100_000)
    assert sum(lengths) / 1000 == pytest.approx(200, rel=0.02)
    assert median(lengths) == pytest.approx(200 * 0.6065, rel=0.02)  # exp(-sigma² / 2)
    assert max(log_normal_lengths(1000, mean=200, sigma=1.0, longest=300)) == 300


def test_work_travels_and_its_advantages_are_grpos() -> None:
    work = Work(lengths=(3, 5, 2, 4), prompt=2, vocab=10, group_size=2)
    assert Work.read(work.dump()) == work
    assert work.tokens == 14 + 4 * 2
    assert [work.reward(episode) for episode in range(4)] == [0.0, 1.0, 1.0, 0.0]
    # Rewards 0 and 1: mean 0.5, deviation (n − 1) √0.5
    expected = 0.5 / (0.5**0.5 + 1e-4)
    assert work.advantages() == pytest.approx([-expected, expected, expected, -expected])
    assert len(work.row(1)) == 7
    assert work.row(1).min() >= 2
    assert (work.row(1) == work.row(1)).all()


@pytest.mark.torch
@pytest.mark.deep
async def test_the_step_beside_a_padded_loop(measure: Measure) -> None:
    pytest.importorskip("transformers")
    measured = await measure("trainer", **TINY, PENSTOCK_BENCH_TRL="")
    _check(measured, ["packed", "padded"])
    assert measured["ratio"]["tokens_over_trl"] is None
    assert "setup-trl" in measured["setup"]["trl"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.deep
@pytest.mark.skipif(not (TRL / "complete").exists(), reason="TRL is not there: scripts/setup-trl")
async def test_the_step_beside_trl(measure: Measure) -> None:
    pytest.importorskip("transformers")
    measured = await measure("trainer", **TINY, PENSTOCK_BENCH_TRL=str(TRL))
    _check(measured, ["packed", "padded", "trl"])
    assert measured["setup"]["trl"].startswith("trl==")
    assert measured["ratio"]["tokens_over_trl"] == _over(measured, "trl")


def _check(measured: dict[str, Any], sides: list[str]) -> None:
    ratios, batch = measured["ratio"], measured["figures"]["batch"]
    cells = batch["sides"]
    assert list(cells) == sides
    for cell in cells.values():
        # The promise under every ratio: one batch, one loss, one gradient.
        assert cell["grad_norm"] == pytest.approx(cells["packed"]["grad_norm"], rel=1e-4)
        assert len(cell["tokens_per_s_rounds"]) == len(cell["tokens_per_cpu_s_rounds"]) == 2
        assert cell["step_peak_mb"] > 0
    assert cells["packed"]["tokens_computed"] == batch["tokens"]
    assert cells["padded"]["tokens_computed"] > batch["tokens"]
    assert ratios["tokens_over_padded_loop"] == _over(measured, "padded")
    assert ratios["peak_over_padded_loop"] < 1  # logits of every padded position, against none


def _over(measured: dict[str, Any], other: str) -> float:
    cells = measured["figures"]["batch"]["sides"]
    mine, theirs = (cells[name]["tokens_per_s_rounds"] for name in ("packed", other))
    return round(median(a / b for a, b in zip(mine, theirs, strict=True)), 3)
