"""Results of a simulated run, counted over the steps after the warm-up."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from penstock.simulator.config import Simulation
from penstock.simulator.episodes import Group


@dataclass(frozen=True, slots=True)
class StepRecord:
    """State at the end of a step; times and tokens are totals since the beginning."""

    ended_s: float
    trained_s: float
    decoding_s: float
    """Summed over servers: each counts while at least one sequence is decoded."""
    decoded: float
    calling_s: float
    """Summed over requests: seconds at the servers."""
    wanted_s: float
    """Summed over time: cores asked for, where roles share them."""
    ready: int
    running: int


@dataclass(frozen=True)
class Result:
    step_s: float
    tokens_per_s: float
    """Sampled tokens that were trained, per second."""
    train_s: float
    """The trainer's busy time per step."""
    trainer_bubble: float
    """Share of the time in which the trainer trains nothing."""
    rollout_bubble: float
    """Share of the servers' time in which they decode nothing. A server with one straggler counts as decoding; a lent
    one has the time in which the trainer trains nothing."""
    tokens_decoded_per_s: float
    staleness: dict[int, float]
    """Share of trained tokens by age in versions."""
    staleness_mean: float
    staleness_max: int
    calling_s: float
    """Seconds that an episode spends at the servers, all its calls together."""
    ready_groups: float
    running_episodes: float
    cores_wanted: float
    """Mean number of cores asked for, where roles share them; else 0."""
    gpus: float
    advice: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Accounts:
    """Collects while the simulation runs."""

    def __init__(self, config: Simulation) -> None:
        self._config = config
        self._steps = [StepRecord(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)]
        self._ages: dict[int, float] = {}
        self.tokens = 0.0
        self.episodes: Counter[int] = Counter()
        """Group number → how often it was trained; a test asserts that it is once."""

    def trained(self, groups: list[Group], step: int) -> None:
        self.episodes.update(group.number for group in groups)
        if step < self._config.warmup:
            return
        for episode in (episode for group in groups for episode in group.episodes):
            self.tokens += episode.tokens
            for version, tokens in episode.versions.items():
                self._ages[step - version] = self._ages.get(step - version, 0.0) + tokens

    def stepped(self, record: StepRecord) -> None:
        self._steps.append(record)

    def result(self) -> Result:
        first, last = self._steps[self._config.warmup], self._steps[-1]
        counted = self._steps[self._config.warmup + 1 :]
        wall_s = last.ended_s - first.ended_s
        trained_s, episodes = last.trained_s - first.trained_s, self._config.groups_per_step * self._config.group_size
        servers_s = wall_s * self._config.rollout.servers + (wall_s - trained_s) * self._config.lent
        total = sum(self._ages.values()) or 1.0
        ages = {age: self._ages[age] / total for age in sorted(self._ages)}
        return Result(
            step_s=wall_s / len(counted),
            tokens_per_s=self.tokens / wall_s,
            train_s=trained_s / len(counted),
            trainer_bubble=1 - trained_s / wall_s,
            rollout_bubble=1 - (last.decoding_s - first.decoding_s) / servers_s,
            tokens_decoded_per_s=(last.decoded - first.decoded) / wall_s,
            staleness=ages,
            staleness_mean=sum(age * share for age, share in ages.items()),
            staleness_max=max(ages, default=0),
            calling_s=(last.calling_s - first.calling_s) / (len(counted) * episodes),
            ready_groups=sum(record.ready for record in counted) / len(counted),
            running_episodes=sum(record.running for record in counted) / len(counted),
            cores_wanted=(last.wanted_s - first.wanted_s) / wall_s,
            gpus=self._config.gpus,
        )
