"""The numbers of a step: one flat mapping, the line of ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.trainer.batch import StepBatch
from penstock.trainer.engine import Update
from penstock.trainer.tally import Totals

MEANS = ("loss", "clip_fraction_low", "clip_fraction_high", "kl_k3")
COUNTS = ("tokens", "tokens_sampled", "tokens_trained", "tokens_masked", "segments", "zero_variance_groups")


def step_metrics(batch: StepBatch, totals: Totals, updates: Sequence[Update | None]) -> dict[str, Any]:
    """Everything but times; `docs/trainer.md` says what each name means."""
    return {
        "step": batch.step,
        "version": batch.step + 1,
        "groups": len(batch.groups),
        "episodes": sum(len(group) for group in batch.groups),
        **_reward(totals),
        **_updates(updates),
        **{name: totals.mean(name) for name in MEANS},
        **_mismatch(totals),
        **_staleness(totals),
        **{name: totals.counts.get(name, 0) for name in COUNTS},
        **_lengths(totals),
        **{name: number for name, number in totals.counts.items() if name.startswith("outcome/")},
        **{name: totals.mean(name) for name in totals.names("episode/")},
    }


def _reward(totals: Totals) -> dict[str, float]:
    mean = totals.mean("reward")
    variance = max(0.0, totals.mean("reward_squared") - mean**2)
    return {"reward": mean, "reward_std": math.sqrt(variance), "advantage_abs": totals.mean("advantage_abs")}


def _updates(updates: Sequence[Update | None]) -> dict[str, float]:
    done = [update for update in updates if update is not None]
    return {
        "grad_norm": max((update.grad_norm for update in done), default=0.0),
        "lr": done[-1].lr if done else 0.0,
        "updates": sum(not update.skipped for update in done),
        "updates_skipped": sum(update.skipped for update in done) + len(updates) - len(done),
    }


def _mismatch(totals: Totals) -> dict[str, float]:
    squared = totals.mean("is_ratio_squared")
    return {
        "logprob_abs_diff_mean": totals.mean("logprob_abs_diff"),
        "logprob_abs_diff_max": totals.max("logprob_abs_diff"),
        "logprob_abs_diff_tokens": totals.number("logprob_abs_diff"),
        "logprob_abs_diff_all_mean": totals.mean("logprob_abs_diff_all"),
        "logprob_abs_diff_all_max": totals.max("logprob_abs_diff_all"),
        "effective_sample_share": totals.mean("is_ratio") ** 2 / squared if squared else 0.0,
        "is_ratio_max": totals.max("is_ratio"),
        "is_weight_mean": totals.mean("is_weight"),
        "is_weight_max": totals.max("is_weight"),
    }


def _staleness(totals: Totals) -> dict[str, Any]:
    ages = {name.removeprefix("staleness/"): n for name, n in totals.counts.items() if name.startswith("staleness/")}
    histogram = {age: ages[age] for age in sorted(ages, key=int)}
    return {
        "staleness_mean": totals.mean("staleness"),
        "staleness_max": int(totals.max("staleness")),
        "staleness_tokens": histogram,
    }


def _lengths(totals: Totals) -> dict[str, float]:
    return {f"{name}_mean": totals.mean(name) for name in ("response_length", "sampled_length", "num_turns")}
