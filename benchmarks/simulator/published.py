"""Published runs as cases: calibrate on the synchronous row of a table, predict the asynchronous one, compare.

The rules are the same for every case (docs/how/scale.md gives the reasons). Into a case goes what its source states.
From the synchronous run's own times two rates follow: the trainer's tokens/s from its update time, and one factor on
the datasheet's decode times from its generation time. Nothing of the asynchronous run is used but its settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from benchmarks.simulator.hardware import (
    MACHINES,
    MODELS,
    gradient_exchange_s,
    offload_s,
    offloaded_bytes,
    token_s,
    token_s_per_sequence,
)
from benchmarks.simulator.rates import planned
from benchmarks.simulator.stated import Case
from penstock.simulator.config import LogNormal, Rollout, Simulation, Trainer, Weights, Work
from penstock.simulator.episodes import draw, trained_tokens
from penstock.simulator.pipeline import simulate, slowest_ranks
from penstock.simulator.result import Result

SIGMA = 1.0
"""Spread of response lengths if the source states only the maximum."""
PROMPT_TOKENS = 150
"""Tokens of a competition problem with its template."""
PROMPTS_PER_ENGINE = 16
"""verl's rollouter keeps no more in flight (`max_concurrent_samples` in fully_async_rollouter.py)."""
CONCURRENT = 1024
"""verl's `max_num_seqs`."""
CALIBRATION_STEPS = 3
HOST_RATE_CASE = "verl-one-step-off-fsdp"
"""No datasheet states the rate of offloading weights and optimizer. It follows from this case's table, so this case
is calibration and no prediction; see `host_bytes_per_s`."""


@dataclass(frozen=True)
class Prediction:
    case: Case
    synchronous: Result
    asynchronous: Result

    @property
    def speedup(self) -> float:
        return self.synchronous.step_s / self.asynchronous.step_s

    @property
    def error(self) -> float:
        """|predicted − published| / published, in the compared window."""
        return abs(self.speedup / self.case.speedup - 1)

    @property
    def largest_error(self) -> float:
        """The same against the furthest of all stated windows."""
        return max(abs(self.speedup / published - 1) for published in self.case.published.values())


def predict(case: Case) -> Prediction:
    calibrated = Calibration(case)
    return Prediction(case, simulate(calibrated.synchronous), simulate(calibrated.asynchronous))


class Calibration:
    """Calibration of both simulations from a synchronous row."""

    def __init__(self, case: Case) -> None:
        self.stated = case.stated
        self.machine = MACHINES[self.stated.machine]
        self.model = MODELS[self.stated.model]
        row = self.stated.synchronous
        self.phases = row.phases
        self.scale = row.window_scale
        self.response = reaching(
            self.stated.response_longest, self.stated.groups_per_step * self.stated.group_size, SIGMA
        )

    @cached_property
    def synchronous(self) -> Simulation:
        """Return the synchronous simulation. Its step is the stated one by construction: both rates are solved for."""
        sampled = simulate(self._simulation(self._synchronous_parts(1.0, self.tokens_per_s)))
        generation_s = sampled.step_s - sampled.train_s
        factor = self.scale * self.phases.generation_s / generation_s
        return self._simulation(self._synchronous_parts(factor, self.tokens_per_s))

    @cached_property
    def asynchronous(self) -> Simulation:
        row, sync = self.stated.asynchronous, self.synchronous
        kept_s = sum(self.phases.scoring_s[name] for name in row.scoring)
        engines = row.rollout_gpus // self.stated.rollout_parallel
        in_flight = 0 if row.whole_batches else PROMPTS_PER_ENGINE * engines
        changes = {"servers": engines, "whole_batches": row.whole_batches, "groups_in_flight": in_flight}
        rollout = sync.rollout.model_copy(update=changes)
        trainer = self._trainer(row.trainer_gpus, self.tokens_per_s, kept_s, row.offload, switching_s=0.0)
        return sync.model_copy(
            update={
                "max_staleness": row.staleness,
                "shipping": "first_ready",
                "colocated": False,
                "rollout": rollout,
                "trainer": trainer.model_copy(update={"chunks": row.chunks}),
                "weights": Weights(sync_s=self.model.bytes / (1e9 * planned("nccl_gb_per_s")), trainer_waits=True),
                "steps": 6,
                "warmup": 2,
            }
        )

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens of the slowest ranks over the part of the stated update time that depends on tokens."""
        return (
            self.slowest_tokens(self.stated.synchronous.gpus // self.stated.sequence_parallel) / self._update_tokens_s
        )

    @property
    def _update_tokens_s(self) -> float:
        """The synchronous update's seconds that tokens take; the rest is exchange of gradients, and offloading."""
        row, update_s = self.stated.synchronous, self.scale * self.phases.update_s
        fixed_s = self.stated.updates * self.exchange_s(row.gpus) + self._offload_s(row.gpus, row.offload)
        if update_s <= fixed_s:
            raise ValueError(f"an update of {update_s:.0f} s cannot hold {fixed_s:.0f} s of copying")
        return update_s - fixed_s

    def slowest_tokens(self, ranks: int) -> float:
        """Summed over the updates of a step, the mean of some steps."""
        config = self._simulation((Rollout(token_s=1.0), Trainer(tokens_per_s=1.0)))
        total, per_step = 0.0, config.groups_per_step
        for step in range(CALIBRATION_STEPS):
            groups = [draw(config, step * per_step + n, step) for n in range(per_step)]
            tokens = [trained_tokens(config, episode) for group in groups for episode in group.episodes]
            total += sum(slowest_ranks(tokens, self.stated.updates, ranks, False, (config.seed, step, 0)))
        return total / CALIBRATION_STEPS

    def _synchronous_parts(self, decode_factor: float, tokens_per_s: float) -> tuple[Rollout, Trainer]:
        row, scoring_s = self.stated.synchronous, sum(self.phases.scoring_s.values())
        gpus, context = self.stated.rollout_parallel, PROMPT_TOKENS + self.response.mean
        rollout = Rollout(
            servers=row.gpus // gpus,
            gpus=gpus,
            concurrent=CONCURRENT,
            token_s=decode_factor * token_s(self.model, self.machine, gpus),
            token_s_per_sequence=decode_factor * token_s_per_sequence(self.model, self.machine, gpus, context),
        )
        return rollout, self._trainer(row.gpus, tokens_per_s, scoring_s, row.offload, self.phases.switching_s)

    def _trainer(self, gpus: int, tokens_per_s: float, scoring_s: float, offload: bool, switching_s: float) -> Trainer:
        phases, stated = self.phases, self.stated
        known_s = phases.generation_s + phases.switching_s + phases.update_s + sum(phases.scoring_s.values())
        other_s = max(0.0, phases.step_s - known_s)
        return Trainer(
            ranks=gpus // stated.sequence_parallel,
            gpus=stated.sequence_parallel,
            tokens_per_s=tokens_per_s,
            updates=stated.updates,
            update_fixed_s=self.exchange_s(gpus),
            scoring=self.scale * scoring_s / self._update_tokens_s,
            step_fixed_s=self.scale * (other_s + switching_s) + self._offload_s(gpus, offload),
        )

    def exchange_s(self, gpus: int) -> float:
        return gradient_exchange_s(self.model, self.machine, self.stated.shards, gpus)

    def _offload_s(self, gpus: int, offload: bool) -> float:
        shards = gpus if self.stated.optimizer == "all" else self.stated.shards
        return offload_s(self.model, self.machine, shards) if offload else 0.0

    def _simulation(self, parts: tuple[Rollout, Trainer]) -> Simulation:
        rollout, trainer = parts
        return Simulation(
            max_staleness="sync",
            shipping="first_ready",
            colocated=True,
            group_size=self.stated.group_size,
            groups_per_step=self.stated.groups_per_step,
            work=Work(prompt_tokens=PROMPT_TOKENS, response=self.response),
            rollout=rollout,
            trainer=trainer,
            steps=CALIBRATION_STEPS,
            warmup=0,
        )


def reaching(longest: float, draws: int, sigma: float) -> LogNormal:
    """The distribution of which one in `draws` is expected to reach `longest`: its (1 − 1/draws)-quantile is there."""
    z = NormalDist().inv_cdf(1 - 1 / max(2, draws))
    return LogNormal(median=longest * math.exp(-sigma * z), sigma=sigma, longest=longest)


def host_bytes_per_s(case: Case) -> float:
    """The rate of offloading, from an update with it on all GPUs and one without it on fewer.

    With r tokens/s of a rank, S the tokens of the slowest ranks and X the exchange of gradients:
    update_async = S_async/r + X_async gives r;  update_sync = S_sync/r + X_sync + offload gives the offload's seconds.
    """
    stated, calibration = case.stated, Calibration(case)
    row, few = stated.synchronous, stated.asynchronous
    if few.update_s is None:
        raise ValueError(f"{case.name}: the asynchronous update time is not stated")

    def slowest(gpus: int) -> float:
        return calibration.slowest_tokens(gpus // stated.sequence_parallel)

    def exchange_s(gpus: int) -> float:
        return stated.updates * calibration.exchange_s(gpus)

    rate = slowest(few.trainer_gpus) / (few.update_s - exchange_s(few.trainer_gpus))
    seconds = row.phases.update_s - slowest(row.gpus) / rate - exchange_s(row.gpus)
    return offloaded_bytes(MODELS[stated.model], stated.shards) / seconds
