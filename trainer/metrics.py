"""The numbers of a step: one flat mapping, the line of ``metrics.jsonl``.

Sums over tokens and episodes do not depend on their split over packs or on their order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from penstock.trainer.batch import StepBatch
from penstock.trainer.engine import RouterLoads, Update
from penstock.trainer.packing import Pack
from penstock.trainer.ranks.distributed import Ranks, merge_by_name
from penstock.trainer.stopping import tokens_without_logprob
from penstock.transfer_queue import is_reached

COUNTS = (
    "tokens",
    "tokens_squared",
    "prefix_tokens_saved",
    "tokens_sampled",
    "tokens_trained",
    "tokens_masked",
    "tokens_without_logprob",
    "segments",
    "zero_variance_groups",
    "single_member_groups",
    "empty_episodes",
    "solved_tasks",
)

MAX_FAULTS = 5
"""Different faults in a step's metrics."""


def tally_batch(tally: MetricAccumulator, batch: StepBatch, advantages: Tensor, packs: Sequence[Pack]) -> None:
    """Count the metrics of the batch itself: rewards, lengths, groups without signal, tokens left out. advantages
    [N]; packs: all of the batch.
    """
    tally.add("reward", batch.rewards)
    tally.add("reward_squared", batch.rewards**2)
    for trajectory, reward in zip(batch.trajectories, batch.rewards, strict=True):
        if trajectory.data_source:
            tally.add(f"source/{trajectory.data_source}", reward)
    tally.add("advantage_abs", means_by_episode(advantages.abs(), batch).numpy())
    tally.add("response_length", [sum(len(s.response_ids) for s in t.segments) for t in batch.trajectories])
    tally.add("sampled_length", [t.num_sampled for t in batch.trajectories])
    tally.add("num_turns", [t.num_turns for t in batch.trajectories])
    loud = means_by_episode(advantages.abs(), batch).numpy() > 0
    tally.count("zero_variance_groups", sum(not loud[batch.group == g].any() for g in np.unique(batch.group)))
    tally.count("single_member_groups", int((np.unique(batch.group, return_counts=True)[1] == 1).sum()))
    solved = (any(is_reached(one, 1.0) for one in rewards) for rewards in batch.rewards_by_task.values())
    tally.count("solved_tasks", sum(solved))
    tally.count("empty_episodes", sum(not trajectory.num_sampled for trajectory in batch.trajectories))
    tally.count("tokens_without_logprob", tokens_without_logprob(batch))
    tally.count("segments", len(batch.rows))
    for trajectory in batch.trajectories:
        tally.count(f"outcome/{trajectory.outcome.kind}", 1)
        if trajectory.fault:
            tally.count(f"fault/{trajectory.fault}", 1)
        for name, value in trajectory.metrics.items():
            tally.add(f"episode/{name}", value)
    for pack in packs:
        tally.count("tokens_squared", pack.tokens_squared)
        tally.count("prefix_tokens_saved", -len(pack.ids))
    for row in batch.rows:
        tally.count("tokens", len(row.ids))
        tally.count("prefix_tokens_saved", len(row.ids) if len(row.targets) else 0)
        tally.count("tokens_sampled", len(row.targets))
        tally.count("tokens_trained", int(row.mask.sum()))
        tally.count("tokens_masked", int((~row.mask).sum()))
        for age, number in zip(*np.unique(row.staleness[row.mask], return_counts=True), strict=True):
            tally.count(f"staleness/{age}", number)


def step_metrics(batch: StepBatch, totals: Totals, updates: Sequence[Update | None]) -> dict[str, Any]:
    """Everything but times; `docs/how/trainer.md` says what each name means."""
    mean = totals.mean("reward")
    sources = totals.names("source/")
    counts = totals.counts
    ages = {int(name.removeprefix("staleness/")): n for name, n in counts.items() if name.startswith("staleness/")}
    faults = {name.removeprefix("fault/"): n for name, n in counts.items() if name.startswith("fault/")}
    return {
        "step": batch.step,
        "version": batch.step + 1,
        "groups": len(batch.groups),
        "episodes": sum(len(group) for group in batch.groups),
        "reward": mean,
        "reward_std": math.sqrt(max(0.0, totals.mean("reward_squared") - mean**2)),
        "advantage_abs": totals.mean("advantage_abs"),
        **_updates(updates),
        "kl_k3": totals.mean("kl_k3"),
        "loss": 0.0,
        **{name.removeprefix("policy/"): totals.mean(name) for name in totals.names("policy/")},
        **{name.replace("/", "_"): totals.mean(name) for name in (*totals.names("value/"), *totals.names("kl/"))},
        **_mismatch(totals),
        "staleness_mean": totals.mean("staleness"),
        "staleness_max": int(totals.max("staleness")),
        "staleness_tokens": {str(age): ages[age] for age in sorted(ages)},
        **{name: counts.get(name, 0) for name in COUNTS},
        **{f"{name}_mean": totals.mean(name) for name in ("response_length", "sampled_length", "num_turns")},
        **{name: number for name, number in counts.items() if name.startswith("outcome/")},
        **{f"{name}/reward": totals.mean(name) for name in sources},
        **{f"{name}/episodes": totals.number(name) for name in sources},
        **{name: totals.mean(name) for name in totals.names("episode/")},
        "faults": faults,
    }


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


def router_metrics(loads: RouterLoads, ranks: Ranks) -> dict[str, float]:
    """Return how evenly a mixture's routers share out tokens, and how often they would have chosen others than the
    engine's.

        load_e = how often expert e was chosen / tokens                 summed over ranks and the step's updates
        max over mean = max_e load_e / mean_e load_e                    1: even
        entropy = −Σ_e q_e · log q_e / log E,  q_e = load_e / Σ load    1: even, 0: one expert has all
        aux loss = E · Σ_e load_e · P_e                                 P_e: mean probability of e; k: both are even

    Aux loss: Fedus et al. 2022, "Switch Transformers" (arXiv:2101.03961), equation 4, over all layers together, as
    transformers' `load_balancing_loss_func` computes it, without the model's coefficient. It is measured and not
    learned. A collective. Empty where no token was learned from.
    """
    # [2 · E + 3] of each layer
    numbers = [torch.cat([layer.chosen, layer.probability, layer.tokens]).cpu() for layer in loads.layers]
    summed: Tensor = sum(ranks.gather_numbers(torch.stack(numbers)))  # type: ignore[assignment]
    tokens, replayed, other = summed[:, -3:].T
    if not bool((tokens > 0).all()):
        return {}
    experts = (summed.shape[1] - 3) // 2
    load, probability = (part / tokens[:, None] for part in (summed[:, :experts], summed[:, experts:-3]))
    peaks = (load.amax(1) / load.mean(1)).tolist()
    shares = load / load.sum(1, keepdim=True)
    entropies = (-torch.special.xlogy(shares, shares).sum(1) / math.log(experts)).tolist()
    metrics = {
        "moe/load_max_over_mean": max(peaks),
        "moe/load_entropy": min(entropies),
        **{f"moe/load_max_over_mean/{number}": peak for number, peak in enumerate(peaks)},
        **{f"moe/load_entropy/{number}": entropy for number, entropy in enumerate(entropies)},
        "moe/replayed": float(replayed.sum() / tokens.sum()),
        "moe/rerouted": float(other.sum() / replayed.sum()) if bool(replayed.sum() > 0) else 0.0,
    }
    if loads.has_aux_loss:
        metrics["moe/aux_loss"] = float(experts * (load.mean(0) * probability.mean(0)).sum())
    return metrics


def means_by_episode(tokens: Tensor, batch: StepBatch) -> Tensor:
    """Return [E]: the mean of tokens [N] by episode; 0 for an episode without tokens."""
    parts = [np.full(len(row.targets), row.episode, dtype=np.int64) for row in batch.rows]
    episode = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
    sums = torch.zeros(len(batch.trajectories), dtype=torch.float64).index_add(0, episode, tokens)
    return sums / torch.bincount(episode, minlength=len(sums)).clamp(min=1)


class MetricAccumulator:
    """Collects values by name on one rank; `reduce` adds up the ranks.

    Values are kept until the end and summed exactly, rounded once over all ranks: the same values give the same bits in
    any order and any split over packs and ranks.
    """

    def __init__(self) -> None:
        self._values: defaultdict[str, list[NDArray[np.float64]]] = defaultdict(list)
        self._tensors: list[tuple[str, Tensor, Tensor | None]] = []
        """Values, and which of them count, on the device where they were computed."""
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, values: ArrayLike) -> None:
        """Values to be averaged."""
        self._values[name].append(np.atleast_1d(np.asarray(values, dtype=np.float64)))

    def add_tensor(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Values [M] to be averaged, of those alone for which `where` [M] is true. They stay on their device until
        `reduce`, and may not be changed before it: a copy to the host would wait for all that the device has to do."""
        self._tensors.append((name, values.detach(), where))

    def count(self, name: str, number: int) -> None:
        """A number to be added up."""
        self._counts[name] += int(number)

    def reduce(self, ranks: Ranks) -> Totals:
        """A collective."""
        for name, values, where in self._tensors:
            numbers = values.cpu().double().numpy()
            self.add(name, numbers if where is None else numbers[where.cpu().numpy()])
        self._tensors = []
        sums = {name: _summary(np.concatenate(parts)) for name, parts in self._values.items()}
        gathered = ranks.gather({"sums": sums, "counts": dict(self._counts)})
        return Totals(gathered)


class Totals:
    """The tallies of all ranks, added up."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self._sums = merge_by_name([part["sums"] for part in parts])
        self.counts: dict[str, int] = {
            name: sum(values) for name, values in merge_by_name([part["counts"] for part in parts]).items()
        }

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._sums if name.startswith(prefix)]

    def number(self, name: str) -> int:
        return sum(int(count) for _, count, _ in self._sums.get(name, []))

    def mean(self, name: str) -> float:
        """0.0 where no value came."""
        total = _fsum([piece for part in self._sums.get(name, []) for piece in part[0]])
        return total / max(1, self.number(name))

    def max(self, name: str) -> float:
        return max((part[2] for part in self._sums.get(name, []) if part[1]), default=0.0)


def exact_sum(values: ArrayLike, ranks: Ranks) -> float:
    """Return the sum of the values of all ranks, rounded once. A collective."""
    mine = exact_parts(np.atleast_1d(np.asarray(values, dtype=np.float64)).tolist())
    return _fsum([piece for parts in ranks.gather(mine) for piece in parts])


def exact_parts(values: Sequence[float]) -> list[float]:
    """A few numbers whose sum is exactly that of `values`: the rounded sum, then what rounding left (Shewchuk 1997,
    "Adaptive Precision Floating-Point Arithmetic", an expansion). What is not finite stays so, alone."""
    parts: list[float] = []
    while True:
        rest = _fsum([*values, *(-part for part in parts)])
        if not math.isfinite(rest):
            return [rest]
        if rest == 0.0:
            return parts
        parts.append(rest)


def _summary(values: NDArray[np.float64]) -> tuple[list[float], int, float]:
    """(exact parts of the sum, number, largest)"""
    return exact_parts(values.tolist()), len(values), float(values.max(initial=-math.inf)) if len(values) else 0.0


def _fsum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond float64
        return math.nan
