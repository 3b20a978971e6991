"""The trainer's benchmark: all sides train the same thing, and ratios are those of the figures beside them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import pytest

from benchmarks.support.work import Work, log_normal_lengths

Measure = Callable[..., Awaitable[dict[str, Any]]]
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
    measured = await measure("trainer", **TINY)
    batch, ratios = measured["figures"]["batch"], measured["ratio"]
    assert list(batch["sides"]) == ["packed", "padded"]
    packed, padded = batch["sides"].values()
    for side in (packed, padded):
        assert len(side["tokens_per_s_rounds"]) == len(side["tokens_per_cpu_s_rounds"]) == 2
        assert side["step_peak_mb"] > 0
    assert padded["grad_norm"] == pytest.approx(packed["grad_norm"], rel=1e-4), "one batch, one loss, one gradient"
    assert padded["tokens_computed"] > packed["tokens_computed"] == batch["tokens"]
    pairs = zip(packed["tokens_per_s_rounds"], padded["tokens_per_s_rounds"], strict=True)
    assert ratios["tokens_over_padded_loop"] == round(median(ours / theirs for ours, theirs in pairs), 3)
    norms = measured["figures"]["tree"]["grad_norm"]
    assert norms["tree"] == pytest.approx(norms["apart"], rel=1e-4)
    assert ratios["tree_tokens_over_longest"] < 1.5
    assert ratios["tree_step_over_rows_apart"] > 0
    assert ratios["peak_over_padded_loop"] < 1  # logits of every padded position, against none
    context = measured["figures"]["context"]
    assert context["grad_norm"]["context"] == pytest.approx(context["grad_norm"]["single"], rel=1e-4)
    assert ratios["context_over_single"] > 0
    assert ratios["cpu_context_over_single"] > 0
    assert ratios["expert_peak_over_share"] <= 1.15
    assert ratios["expert_bytes_over_formula"] == pytest.approx(1, rel=0.05)
