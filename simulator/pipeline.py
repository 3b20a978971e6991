"""The simulation: groups are admitted, rolled out and trained; the end of a step makes a version.

    admit ──► rollouts ──► ready ──► trainer ──► version ──► servers, and room at the gate

Who wakes whom: a version that reaches the servers wakes `admit`; a group that ends wakes `_try_train`; the end of
training wakes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.simulator.config import Simulation, Trainer
from penstock.simulator.episodes import Group, draw, may_admit, take, trained_tokens
from penstock.simulator.result import Accounts, Result, StepRecord
from penstock.simulator.rollouts import Rollouts
from penstock.simulator.stage import Clock, Host, Stage


def train_s(trainer: Trainer, tokens: Sequence[float], updates: int, seed: Sequence[int]) -> float:
    """Seconds for `tokens` (of each episode), in `updates` optimizer updates with everything that is done per token.

    T = Σ_updates ( max_ranks Σ tokens / tokens_per_s · (1 + scoring) + update_fixed_s ); step_fixed_s is not in it.
    """
    slowest = slowest_ranks(tokens, updates, trainer.ranks, trainer.balanced, seed)
    return sum(slowest) / trainer.tokens_per_s * (1 + trainer.scoring) + updates * trainer.update_fixed_s


def slowest_ranks(
    tokens: Sequence[float], updates: int, ranks: int, balanced: bool, seed: Sequence[int]
) -> list[float]:
    """Tokens of the fullest rank in each update. Episodes are dealt to updates and ranks at random, the same for all
    numbers of ranks; `balanced` then moves them so that ranks are equally full (longest first to the emptiest)."""
    order = np.random.default_rng([*seed, len(tokens)]).permutation(len(tokens))
    fullest = []
    for part in np.array_split(np.asarray(tokens, dtype=float)[order], updates):
        loads = np.zeros(ranks)
        if balanced:
            for length in sorted(part, reverse=True):
                loads[loads.argmin()] += length
        else:
            np.add.at(loads, np.arange(len(part)) % ranks, part)
        fullest.append(float(loads.max()))
    return fullest


def simulate(config: Simulation) -> Result:
    """Returns the result of a simulated run. The same config gives the same result. Raises `StuckSimulation`."""
    return Pipeline(config).run()


class Pipeline:
    def __init__(self, config: Simulation) -> None:
        self.config = config
        self.clock = Clock()
        self.host = host = Host(self.clock, config.cores, config.background) if config.cores else None
        self.rollouts = Rollouts(self.clock, config, host, self._ended)
        self.trainer = Stage(self.clock, lambda _: 1.0, 1, host)
        self.accounts = Accounts(config)
        self.admitted = 0
        self.version = 0
        """Version of the rollout servers; the trainer is at `step`."""
        self.step = 0
        self._part: list[Group] = []
        self._trained_parts = 0
        self._training = False
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []

    def run(self) -> Result:
        self._admit()
        self.clock.run(lambda: self.step >= self.config.steps)
        return self.accounts.result()

    # rollouts ------------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        rollout = self.config.rollout
        while may_admit(self.config, self.admitted, self.version):
            if rollout.groups_in_flight and len(self._running) >= rollout.groups_in_flight:
                return
            # With whole batches: inside a batch always, at the start of one only when nothing runs.
            if rollout.whole_batches and self._running and self.admitted % self.config.groups_per_step == 0:
                return
            group = draw(self.config, self.admitted, self.version)
            self.admitted += 1
            self._running[group.number] = group
            self.rollouts.begin(group)

    def _ended(self, group: Group) -> None:
        del self._running[group.number]
        self._ready.append(group)
        self._admit()
        self._try_train()

    # training ------------------------------------------------------------------------------------------------------
    def _try_train(self) -> None:
        if self._training or self.step >= self.config.steps:
            return
        taken = take(self.config, self._ready, list(self._running.values()), self.step)
        if taken is None:
            return
        chosen = {group.number for group in taken}
        self._ready = [group for group in self._ready if group.number not in chosen]
        self._part, self._training = taken, True
        if self.config.lend and self.rollouts.sleep():
            self.clock.after(self.config.hand_over_s, self._train)
        else:
            self._train()

    def _train(self) -> None:
        trainer = self.config.trainer
        tokens = [trained_tokens(self.config, episode) for group in self._part for episode in group.episodes]
        seed = (self.config.seed, self.step, self._trained_parts)
        updates = max(1, round(trainer.updates / trainer.chunks))
        work_s = train_s(trainer, tokens, updates, seed) + trainer.step_fixed_s / trainer.chunks
        self.trainer.submit(work_s, lambda _: self._part_trained())

    def _part_trained(self) -> None:
        self.accounts.trained(self._part, self.step)
        self._trained_parts = (self._trained_parts + 1) % self.config.trainer.chunks
        if self._trained_parts:
            self._training = False
            self._try_train()
            return
        self.step += 1
        version = self.step
        self.accounts.stepped(self._record())
        self.clock.after(self.config.weights.sync_s, lambda: self._arrived(version))
        if not self.config.weights.trainer_waits:
            self._go_on()

    def _go_on(self) -> None:
        self._training = False
        self._try_train()
        if self.config.lend and not self._training:
            self.rollouts.wake(self.config.hand_over_s)

    def _arrived(self, version: int) -> None:
        self.version = version
        self.rollouts.swap(version)
        if self.config.weights.trainer_waits:
            self._go_on()
        self._admit()

    def _record(self) -> StepRecord:
        stages = [server.stage for server in self.rollouts.servers]
        for stage in (*stages, self.trainer):
            stage.settle()
        if self.host is not None:
            self.host.settle()
        return StepRecord(
            ended_s=self.clock.now_s,
            trained_s=self.trainer.busy_s,
            decoding_s=sum(stage.busy_s for stage in stages),
            decoded=sum(stage.work_done for stage in stages),
            calling_s=sum(stage.present_s for stage in stages),
            wanted_s=self.host.wanted_s if self.host is not None else 0.0,
            ready=len(self._ready),
            running=self.rollouts.running,
        )
