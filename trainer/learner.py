"""The algorithm of one step on one rank: pack, score, advantages, update. All of it runs in the torch thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.common import options_of
from penstock.trainer.advantages import ADVANTAGES, Advantages, needs_of
from penstock.trainer.advantages.prime import outcome_loss
from penstock.trainer.batch import Row, StepBatch, minibatch_bounds
from penstock.trainer.config import TrainerConfig
from penstock.trainer.credit import Estimators, TokenScores, episodes_of
from penstock.trainer.distillation import mixed, teacher_gap
from penstock.trainer.engine import Engine, Update
from penstock.trainer.filters import FILTERS
from penstock.trainer.grouping import best_and_worst, sum_by
from penstock.trainer.loss import (
    ESTIMATORS,
    Objective,
    Targets,
    divisor,
    episode_weights,
    proximal_logprobs,
    select_tokens,
    steered,
    trained_tokens,
    value_loss,
)
from penstock.trainer.losses import LOSSES
from penstock.trainer.metrics import MetricAccumulator, exact_sum, router_metrics, step_metrics, tally_batch
from penstock.trainer.packing import Pack, pack_rows
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.stopping import BadSteps


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A rank's batch in packs, with what the models say of its N sampled tokens at the start of the step."""

    minibatches: Sequence[Sequence[Pack]]
    tokens: TokenScores
    kl: float = 0.0
    """KL to the reference policy per episode, over all ranks, under trainer.kl.in_reward"""


class Learner:
    """Everything between a batch and new weights. Every method is a collective."""

    def __init__(self, config: TrainerConfig, engine: Engine, ranks: Ranks, *, scores_first: bool = False) -> None:
        """`scores_first`: `score` computes all logprobs, for who looks at them before the update."""
        self._config = config
        self._always_first = scores_first
        self._engine = engine
        self._ranks = ranks
        self._estimators = Estimators(config, ranks)
        self._watch = BadSteps(config.max_bad_steps)
        self._has_implicit = "implicit" in needs_of(ADVANTAGES.get(config.advantage))

    def score(self, batch: StepBatch) -> ScoredBatch:
        """With one minibatch the training forward's own logprobs are those at the start of the step; with more, the
        later ones are trained after the weights have moved, so all are scored first, as they are for what needs them
        earlier."""
        minibatches = [self._packs(rows) for rows in self._split(batch)]
        if self._scores_first:
            minibatches = self._with(minibatches, self._engine.score, "proximal")
        if self._config.kl.needs_reference or self._has_implicit:
            # By the reference's own experts: those of the engine are another policy's choice.
            score = lambda packs: self._engine.score_reference([replace(pack, experts=None) for pack in packs])  # noqa: E731
            minibatches = self._with(minibatches, score, "reference")
        kl_rewards, kl = self._kl_rewards(minibatches, batch) if self._config.kl.in_reward else (None, 0.0)
        values = self._in_order(minibatches, self._engine.values, batch) if self._engine.has_critic else None
        implicit = self._implicit_rewards(minibatches, values) if self._has_implicit else None
        gap = self._teacher_gap(minibatches, batch) if self._config.distill.in_advantage else None
        return ScoredBatch(minibatches, TokenScores(kl_rewards, values, implicit, gap), kl)

    def advantages(self, batch: StepBatch, scored: ScoredBatch) -> Advantages:
        """Return the advantages of the rank's N sampled tokens. A collective."""
        episodes = episodes_of(batch, self._config, scored.tokens)
        advantages = self._estimators(episodes, [one.data_source for one in batch.trajectories])
        gap = scored.tokens.teacher_gap
        if gap is None:
            gap = torch.zeros(len(advantages.tokens))
        return mixed(advantages, gap, self._config.distill) if self._config.distill.enabled else advantages

    def update(
        self, batch: StepBatch, scored: ScoredBatch, advantages: Advantages, *, again: bool = False
    ) -> dict[str, Any]:
        """New weights; returns the step's metrics, the same on all ranks. `again`: its version is published already.
        Raises `TrainingDiverged`."""
        tally = MetricAccumulator()
        of_critic: list[Update] = []
        if self._has_implicit:
            of_critic = self._learn_implicit(batch, scored, tally)
        elif self._engine.has_critic:
            of_critic = self._learn_values(scored, advantages, tally)
        updates: list[Update | None] = [None] * len(scored.minibatches)
        if not self._engine.has_critic or batch.step >= self._config.critic.warmup_steps:
            updates = [self._update_one(batch, scored, number, advantages, tally) for number in range(len(updates))]
        self._watch.check(batch, [*updates, *of_critic], self._ranks, again=again)
        if (kl := self._config.kl).in_reward:
            coefficient, episodes = self._engine.kl_coefficient, sum(len(group) for group in batch.groups)
            tally.add("kl/coefficient", coefficient)
            tally.add("kl/per_episode", scored.kl)
            self._engine.kl_coefficient = steered(coefficient, scored.kl, kl.target, episodes, kl.horizon)
        tally_batch(tally, batch, advantages.tokens, list(chain.from_iterable(scored.minibatches)))
        metrics = step_metrics(batch, tally.reduce(self._ranks), updates)
        loads = self._engine.take_router_loads()
        return metrics if loads is None else {**metrics, **router_metrics(loads, self._ranks)}

    @property
    def _scores_first(self) -> bool:
        config = self._config
        recomputed = config.minibatches > 1 and config.proximal == "recomputed"
        penalised = config.kl.in_reward > 0 or config.distill.in_advantage > 0
        return self._always_first or recomputed or penalised or hasattr(LOSSES.get(config.loss), "choose")

    def _update_one(
        self, batch: StepBatch, scored: ScoredBatch, number: int, advantages: Advantages, tally: MetricAccumulator
    ) -> Update | None:
        config, packs = self._config, scored.minibatches[number]
        tokens = trained_tokens(packs, len(batch.trajectories))
        total, episodes = self._ranks.sum(int(tokens.sum())), self._ranks.sum(int((tokens > 0).sum()))
        # Nothing to train on (all masked, or no token was sampled): the version still advances, with equal weights.
        if not total:
            return None
        weights, group = episode_weights(config.aggregation, tokens), torch.from_numpy(batch.group)
        if config.filter is not None:
            weigh = FILTERS.bind(config.filter, config.filter_options)
            weights = weights * weigh(torch.from_numpy(batch.rewards), group)
        chosen = select_tokens(config, packs, advantages.tokens, group, step=batch.step, ranks=self._ranks)
        targets = Targets(advantages.tokens.float(), weights, chosen, self._sequences(batch, packs, tokens))
        by = divisor(config.aggregation, total, episodes, config.aggregation_length)
        return self._engine.update(packs, Objective(config, targets, tally), by, batch.step)

    def _sequences(self, batch: StepBatch, packs: Sequence[Pack], tokens: Tensor) -> Tensor | None:
        """tokens [E], trained ones → [E, 4] as in `Targets`. A collective."""
        if "sequences" not in needs_of(LOSSES.get(self._config.loss)):
            return None
        ratio = torch.zeros(len(tokens), dtype=torch.float64)
        if self._scores_first or self._config.proximal != "recomputed":
            for pack, now in zip(packs, self._engine.score(packs), strict=True):
                change = now - proximal_logprobs(self._config.proximal, pack, now)
                ratio.index_add_(0, pack.episode[pack.trained], change[pack.trained].double())
        partner, side = best_and_worst(torch.from_numpy(batch.rewards), torch.from_numpy(batch.group), tokens > 0)
        rival = torch.where(side != 0, ratio[partner], 0.0)
        return torch.stack([ratio, tokens.clamp(min=1).double(), rival, side.double()], dim=1).float()

    def _learn_values(self, scored: ScoredBatch, advantages: Advantages, tally: MetricAccumulator) -> list[Update]:
        assert scored.tokens.values is not None
        assert advantages.returns is not None, "an estimator that needs values says what they should have been"
        device = self._ranks.device
        old, returns = scored.tokens.values.to(device), advantages.returns.float().to(device)

        def loss(pack: Pack, values: Tensor) -> Tensor:
            token, trained = pack.token[pack.trained], values[pack.trained]
            per_token = value_loss(trained, old[token], returns[token], self._config.critic.clip)
            tally.add_tensor("value/loss", per_token)
            tally.add_tensor("value/mean", trained)
            return per_token.sum() if len(trained) else values.sum() * 0

        counted = [(packs, self._ranks.sum(sum(len(p.trained) for p in packs))) for packs in scored.minibatches]
        updates = [self._engine.update_critic(packs, loss, tokens) for packs, tokens in counted if tokens]
        tally.add("value/grad_norm", [update.grad_norm for update in updates])
        return updates

    def _learn_implicit(self, batch: StepBatch, scored: ScoredBatch, tally: MetricAccumulator) -> list[Update]:
        """The cross-entropy of `prime`: each episode's reward as its label. Segments of an episode in other packs count
        as they were scored at the start of the step."""
        assert scored.tokens.process_rewards is not None
        rewards, outcomes = scored.tokens.process_rewards.float(), torch.from_numpy(batch.rewards).float()
        of_rows = [torch.full((len(row.targets),), row.episode) for row in batch.rows]
        everything = torch.cat([torch.zeros(0, dtype=torch.long), *of_rows])
        sums = sum_by(rewards, everything, len(outcomes))
        lengths = torch.bincount(everything, minlength=len(outcomes))

        def loss(pack: Pack, values: Tensor) -> Tensor:
            assert pack.reference is not None
            if not len(pack.token):  # the graph stays whole: other ranks' backward waits for this one
                return values.sum() * 0
            episodes, index = pack.episode.cpu().unique(return_inverse=True)
            place = index.to(values.device)
            now = sum_by(self._beta * (values - pack.reference), place, len(episodes))
            rest = sums[episodes] - sum_by(rewards[pack.token.cpu()], index, len(episodes))
            entropy = outcome_loss(now, rest.to(now.device), outcomes[episodes].to(now.device))
            share = (torch.bincount(index) / lengths[episodes]).to(now.device)
            return (entropy + (share - 1) * entropy.detach()).sum()

        tally.add("value/process_reward", rewards.double().numpy())
        tally.add("value/loss", outcome_loss(sums, torch.zeros_like(sums), outcomes)[lengths > 0].double().numpy())
        nothing = torch.zeros(0, dtype=torch.long)
        counted = [
            (packs, self._ranks.sum(len(torch.cat([nothing, *(pack.episode for pack in packs)]).unique())))
            for packs in scored.minibatches
        ]
        updates = [self._engine.update_critic(packs, loss, episodes) for packs, episodes in counted if episodes]
        tally.add("value/grad_norm", [update.grad_norm for update in updates])
        return updates

    @property
    def _beta(self) -> float:
        """The factor of the implicit reward."""
        options = {**options_of(ADVANTAGES.get(self._config.advantage)), **self._config.advantage_options}
        return float(options["beta"])

    def _implicit_rewards(self, minibatches: Sequence[Sequence[Pack]], logprobs: Tensor | None) -> Tensor:
        """logprobs [N] of the implicit reward model → [N] β · (logprobs − the reference's)"""
        assert logprobs is not None
        rewards = torch.zeros_like(logprobs)
        for pack in (pack for packs in minibatches for pack in packs):
            assert pack.reference is not None
            rewards[pack.token] = self._beta * (logprobs[pack.token] - pack.reference)
        return rewards

    def _teacher_gap(self, minibatches: Sequence[Sequence[Pack]], batch: StepBatch) -> Tensor:
        """[N] see `distillation`"""
        gap = torch.zeros(_tokens(batch))
        for pack in (pack for packs in minibatches for pack in packs):
            assert pack.proximal is not None
            if pack.teacher is not None:
                gap[pack.token] = teacher_gap(pack.proximal, pack.teacher, self._config.distill.clip)
        return gap

    def _kl_rewards(self, minibatches: Sequence[Sequence[Pack]], batch: StepBatch) -> tuple[Tensor, float]:
        """([N] −coefficient · KL of each token, KL per episode over all ranks)"""
        kl = torch.zeros(_tokens(batch))
        for pack in (pack for packs in minibatches for pack in packs):
            assert pack.proximal is not None
            assert pack.reference is not None
            kl[pack.token] = ESTIMATORS[self._config.kl.estimator](pack.proximal - pack.reference)
        episodes = max(self._ranks.sum(len(batch.trajectories)), 1.0)
        return -self._engine.kl_coefficient * kl, exact_sum(kl, self._ranks) / episodes

    def _with(
        self, minibatches: Sequence[Sequence[Pack]], score: Callable[[Sequence[Pack]], list[Tensor]], name: str
    ) -> list[list[Pack]]:
        return [
            [replace(pack, **{name: tensor}) for pack, tensor in zip(packs, score(packs), strict=True)]
            for packs in minibatches
        ]

    def _in_order(
        self,
        minibatches: Sequence[Sequence[Pack]],
        score: Callable[[Sequence[Pack]], list[Tensor]],
        batch: StepBatch,
    ) -> Tensor:
        """[N] in the order of rows"""
        values = torch.zeros(_tokens(batch))
        for packs in minibatches:
            for pack, tensor in zip(packs, score(packs), strict=True):
                values[pack.token] = tensor
        return values

    def _packs(self, rows: Sequence[Row]) -> list[Pack]:
        share, layout = self._engine.shares_prefixes, self._engine.row_layout
        return pack_rows(rows, self._config.micro_batch_tokens, share=share, layout=layout)

    def _split(self, batch: StepBatch) -> list[list]:
        bounds = minibatch_bounds(len(batch.groups), self._config.minibatches)
        return [[row for row in batch.rows if start <= batch.group[row.episode] < end] for start, end in bounds]


def _tokens(batch: StepBatch) -> int:
    return sum(len(row.targets) for row in batch.rows)
