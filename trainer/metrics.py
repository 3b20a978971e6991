"""The numbers of a step: one flat mapping, the line of ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.trainer.bad_steps import tokens_without_logprob
from penstock.trainer.batch import StepBatch
from penstock.trainer.credit import means_by_episode
from penstock.trainer.sharded import Update
from penstock.trainer.tally import Tally, Totals

MEANS = ("kl_k3",)
COUNTS = (
    "tokens",
    "tokens_sampled",
    "tokens_trained",
    "tokens_masked",
    "tokens_without_logprob",
    "segments",
    "zero_variance_groups",
    "single_member_groups",
    "empty_episodes",
)


def tally_batch(tally: Tally, batch: StepBatch, advantages: Tensor) -> None:
    """What the batch itself says: rewards, lengths, groups without signal, tokens left out. advantages [N]"""
    tally.add("reward", batch.rewards)
    tally.add("reward_squared", batch.rewards**2)
    tally.add("advantage_abs", means_by_episode(advantages.abs(), batch).numpy())
    tally.add("response_length", [sum(len(s.response_ids) for s in t.segments) for t in batch.trajectories])
    tally.add("sampled_length", [t.num_sampled for t in batch.trajectories])
    tally.add("num_turns", [t.num_turns for t in batch.trajectories])
    loud = means_by_episode(advantages.abs(), batch).numpy() > 0
    tally.count("zero_variance_groups", sum(not loud[batch.group == g].any() for g in np.unique(batch.group)))
    tally.count("single_member_groups", int((np.unique(batch.group, return_counts=True)[1] == 1).sum()))
    tally.count("empty_episodes", sum(not trajectory.num_sampled for trajectory in batch.trajectories))
    tally.count("tokens_without_logprob", tokens_without_logprob(batch))
    tally.count("segments", len(batch.rows))
    for trajectory in batch.trajectories:
        tally.count(f"outcome/{trajectory.outcome.kind}", 1)
        for name, value in trajectory.metrics.items():
            tally.add(f"episode/{name}", value)
    _tally_tokens(tally, batch)


def _tally_tokens(tally: Tally, batch: StepBatch) -> None:
    for row in batch.rows:
        tally.count("tokens", len(row.ids))
        tally.count("tokens_sampled", len(row.targets))
        tally.count("tokens_trained", int(row.mask.sum()))
        tally.count("tokens_masked", int((~row.mask).sum()))
        for age, number in zip(*np.unique(row.staleness[row.mask], return_counts=True), strict=True):
            tally.count(f"staleness/{age}", number)


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
        **_policy(totals),
        **{name.replace("/", "_"): totals.mean(name) for name in (*totals.names("value/"), *totals.names("kl/"))},
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


def _policy(totals: Totals) -> dict[str, float]:
    """Whatever the loss measures, under its own names."""
    found = {name.removeprefix("policy/"): totals.mean(name) for name in totals.names("policy/")}
    return {"loss": 0.0, **found}


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
