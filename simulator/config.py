"""A cluster and its work, as `penstock simulate FILE` reads them, and the distributions they draw from."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Draws = NDArray[np.float64]


class LogNormal(BaseModel):
    """``min(longest, median * exp(sigma * z))``, z standard normal. What would be longer is cut, as engines cut it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float = Field(ge=0, description="Half of the draws are below. Tokens or seconds, by the key's name.")
    sigma: float = Field(
        1.0, ge=0, description="Spread of the logarithm; 0: all the same. Measured lengths: 0.7 to 1.3."
    )
    longest: float | None = Field(None, gt=0, description="Ceiling: the token limit, or the time-out. None: none.")

    def of(self, z: Draws) -> Draws:
        drawn = self.median * np.exp(self.sigma * z)
        return drawn if self.longest is None else np.minimum(self.longest, drawn)

    @property
    def mean(self) -> float:
        """Closed form: E[min(L, X)] = m·e^(σ²/2)·Φ(c − σ) + L·(1 − Φ(c)) with c = ln(L/m)/σ."""
        uncut = self.median * math.exp(self.sigma**2 / 2)
        if self.longest is None:
            return uncut
        if not self.sigma or not self.median:
            return min(self.longest, uncut)
        normal, cut = NormalDist(), math.log(self.longest / self.median) / self.sigma
        return uncut * normal.cdf(cut - self.sigma) + self.longest * (1 - normal.cdf(cut))


STALENESS_NAMES = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def _staleness(value: Any) -> Any:
    return STALENESS_NAMES.get(value, value) if isinstance(value, str) else value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Work(Section):
    prompt_tokens: float = Field(256, ge=0, description="Tokens of a prompt.")
    response: LogNormal = Field(description="Tokens sampled per episode, all turns together: median, sigma, longest.")
    turns: float = Field(1, ge=1, description="Model calls per episode; 1.7: two for 70 %, one for the others.")
    tool_s: LogNormal = Field(LogNormal(median=0), description="Seconds that the tools of a turn take.")
    observation_tokens: float = Field(0, ge=0, description="Tokens that the tools of a turn answer.")


class Rollout(Section):
    servers: int = Field(1, ge=1, description="Rollout servers.")
    gpus: float = Field(1, gt=0, description="GPUs of one server.")
    concurrent: int = Field(256, ge=1, description="Most sequences that one server decodes together; more wait.")
    token_s: float = Field(gt=0, description="Seconds per token of a sequence that is alone on its server.")
    token_s_per_sequence: float = Field(
        0, ge=0, description="Seconds added to that by each further sequence: servers saturate at its inverse."
    )
    prefill_tokens_per_s: float = Field(0, ge=0, description="Of one request; 0: prompts cost nothing.")
    in_flight: int = Field(0, ge=0, description="Most episodes of all agent workers together; 0: any.")
    groups_in_flight: int = Field(0, ge=0, description="Most groups that run at once; 0: any.")
    start_s: float = Field(0, ge=0, description="Work before an episode's first call, such as starting its box.")
    starts_at_once: int = Field(1, ge=1, description="How many are started together.")
    lost_after_s: float = Field(0, ge=0, description="Mean time until a server is lost, as a spot machine; 0: never.")
    back_after_s: float = Field(60, gt=0, description="From the loss of a server until another has taken its place.")
    whole_batches: bool = Field(False, description="A step's groups begin only when all earlier groups have ended.")


class Trainer(Section):
    ranks: int = Field(1, ge=1, description="Data-parallel ranks; the slowest ends an update.")
    gpus: float = Field(1, gt=0, description="GPUs of one rank (tensor, context and sequence parallel).")
    tokens_per_s: float = Field(gt=0, description="Tokens trained per second by one rank.")
    updates: int = Field(1, ge=1, description="Optimizer updates per step.")
    update_fixed_s: float = Field(0, ge=0, description="Seconds per update that more ranks do not shorten.")
    scoring: float = Field(0, ge=0, description="Forward passes before the update, as a share of its token time.")
    step_fixed_s: float = Field(0, ge=0, description="Seconds per step that do not depend on tokens.")
    chunks: int = Field(1, ge=1, description="Parts in which a step's groups are taken, each as soon as it is ready.")
    balanced: bool = Field(False, description="Ranks get equal shares of tokens (longest first), not of episodes.")


class Weights(Section):
    sync_s: float = Field(0, ge=0, description="From the end of a step until servers have its version.")
    pause_s: float = Field(0, ge=0, description="Of each server at a swap; what it was decoding continues after it.")
    trainer_waits: bool = Field(False, description="The trainer continues only when the servers have the version.")


class Simulation(Section):
    """One run. Colocated synchronous training is `max_staleness: sync` with `colocated: true`."""

    max_staleness: Annotated[float, BeforeValidator(_staleness)] = Field(
        2, ge=0, le=64, description="sync, one_step_off, fully_async, or a number; a fraction only with first_ready."
    )
    shipping: Literal["bounded", "first_ready"] = Field(
        "bounded", description="Which groups a step takes: as the queue does, none over-age; or whichever ended first."
    )
    colocated: bool = Field(False, description="Rollout and training take turns on the same GPUs.")
    lend: bool = Field(False, description="The trainer's GPUs decode between its steps, as further servers.")
    hand_over_s: float = Field(0, ge=0, description="Seconds until GPUs that are lent have changed sides, each way.")
    group_size: int = Field(8, ge=1, description="Episodes per task.")
    groups_per_step: int = Field(8, ge=1, description="Tasks per step.")
    work: Work
    rollout: Rollout
    trainer: Trainer
    weights: Weights = Weights()
    cores: float = Field(0, ge=0, description="All roles share this many CPU cores; 0: each has its own machine.")
    background: float = Field(0, ge=0, description="Processes of others that want those cores all the time.")
    steps: int = Field(12, ge=2, description="Steps to simulate.")
    warmup: int = Field(3, ge=0, description="Steps that are not counted: the pipeline fills.")
    seed: int = Field(0, ge=0, description="Of all draws. Settings are compared on the same episodes.")

    @property
    def gpus(self) -> float:
        rollout, trainer = self.rollout.servers * self.rollout.gpus, self.trainer.ranks * self.trainer.gpus
        return max(rollout, trainer) if self.colocated else rollout + trainer

    @property
    def lent(self) -> int:
        """Servers on the trainer's GPUs."""
        return int(self.trainer.ranks * self.trainer.gpus // self.rollout.gpus) if self.lend else 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.colocated and self.max_staleness:
            raise ValueError("colocated: roles that take turns are synchronous; set max_staleness: sync")
        if self.lend and (self.colocated or self.cores):
            raise ValueError("lend: the trainer lends its own GPUs; set colocated: false and cores: 0")
        if self.lend and self.rollout.lost_after_s:
            raise ValueError("rollout.lost_after_s: lent GPUs are not lost in this model; set lend: false")
        if self.lend and not self.lent:
            raise ValueError("lend: no server fits on the trainer's GPUs; lower rollout.gpus, or raise trainer.ranks")
        if self.groups_per_step % self.trainer.chunks:
            raise ValueError(f"trainer.chunks: {self.groups_per_step} groups do not divide into {self.trainer.chunks}")
        if self.shipping == "bounded" and (self.max_staleness % 1 or self.trainer.chunks > 1):
            raise ValueError("shipping: bounded takes a whole max_staleness and trainer.chunks: 1; or first_ready")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup: {self.warmup} of {self.steps} steps leave nothing to count")
        return self
