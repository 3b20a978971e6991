"""The loss of a pack from logprobs: correction, policy loss, KL and entropy, each token times its weight.

From one loss per token to one number: the weight of each token, and what the sum is divided by.

    L = Σ_n w_n · l_n / D        n over the trained tokens of a minibatch on all ranks, e(n) the token's episode

    token_mean     w = 1                  D = trained tokens              DAPO (arXiv:2503.14476), equation 8
    episode_mean   w = 1 / tokens of e    D = episodes                    GRPO (arXiv:2402.03300), equation 3
    episode_sum    w = 1                  D = episodes                    sequence mean of token sums
    constant       w = 1                  D = episodes · length           Dr. GRPO (arXiv:2503.20783), section 3.2

An episode is the sequence, however many segments its tokens lie in: they share its weight. Episodes without a trained
token count nowhere. D is counted over all ranks before the first forward, so the split over packs and ranks changes
nothing.

Losses that treat a few tokens in another way choose them among all trained tokens of a minibatch, on all ranks.

The proximal policy: what an update must stay near, and what the behaviour policy is corrected to.

    recomputed     the policy at the start of the step: the training forward itself with one minibatch, scored with more
    interpolated   logπ_prox = logπ_behave + s/(s + 1) · (logπ − logπ_behave),   s = the token's staleness
    behaviour      the engine's own logprobs: no correction is left to make

Decoupled PPO: Hilton et al. 2022 (arXiv:2110.00641). Interpolation: Li et al. 2025, "A-3PO: Accelerating Asynchronous
LLM Training with Staleness-aware Proximal Policy Approximation" (arXiv:2512.06547): a policy s versions ahead of the
one that sampled, on the way to the one that this step makes, s + 1 versions ahead. It spares a forward pass.

KL to the reference policy, estimated from the logprobs of sampled tokens, and the controller of its coefficient.

    d = logπ − logπ_ref
    k1 = d                        unbiased, may be negative
    k2 = d² / 2                   biased, its gradient is that of KL
    k3 = exp(−d) − 1 + d          unbiased, never negative
    low_variance                  k3 with d held within ±20 and the result within ±10

Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k3 is GRPO's, arXiv:2402.03300,
equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.common import options_of
from penstock.trainer.config import TrainerConfig
from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput
from penstock.trainer.distillation import coarse_divergence, teacher_coarse, teacher_gap, top_mass
from penstock.trainer.logprobs import Outputs
from penstock.trainer.losses import LOSSES, LossInput, Sequences
from penstock.trainer.metrics import MetricAccumulator
from penstock.trainer.packing import Pack, on_device
from penstock.trainer.ranks.distributed import Ranks


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a rank's minibatch. N counts the rank's sampled tokens, E its episodes."""

    advantages: Tensor
    """[N] float32"""
    episode_weights: Tensor
    """[E] float64, the loss of each token counts this often: aggregation times filter"""
    chosen: Tensor | None = None
    """[N] bool, see `losses.Choice`"""
    sequences: Tensor | None = None
    """[E, 4] float32, the fields of `losses.Sequences` by episode, where the loss needs them"""

    def to(self, device: torch.device) -> Targets:
        parts = (self.advantages, self.episode_weights, self.chosen, self.sequences)
        return Targets(*(part if part is None else on_device(part, device) for part in parts))  # type: ignore[arg-type]


class Objective:
    """The engine's `PackLoss` for one minibatch; tallies what is measured on the way."""

    def __init__(self, config: TrainerConfig, targets: Targets, tally: MetricAccumulator) -> None:
        self._config = config
        self._targets = targets
        self._tally = tally
        self._loss = LOSSES.bind(config.loss, config.loss_options)
        self._correction = CORRECTIONS.bind(config.correction, config.correction_options) if config.correction else None

    def __call__(self, pack: Pack, outputs: Outputs) -> Tensor:
        """Waits for no device: the host asks for the backward while the forward is computed."""
        # Tokens that are not trained on are left out here, not multiplied by 0: 0 · inf would still spoil the gradient.
        trained, targets = pack.trained, self._targets_on(pack.trained.device)
        token, episode, segment = pack.token[trained], pack.episode[trained], pack.segment[trained]
        behaviour, logprobs = pack.behaviour[trained], outputs.logprobs[trained]
        proximal = proximal_logprobs(self._config.proximal, pack, outputs.logprobs)[trained]
        corrected = self._corrected(CorrectionInput(proximal, behaviour, segment))
        inputs = LossInput(
            logprobs,
            proximal,
            behaviour,
            targets.advantages[token],
            corrected.weights,
            segment,
            targets.chosen[token] if targets.chosen is not None else None,
            Sequences(*targets.sequences[episode].unbind(1)) if targets.sequences is not None else None,
        )
        result = self._loss(inputs)
        per_token = torch.where(corrected.kept, result.per_token, 0.0)
        for name, values in {"loss": per_token, **result.metrics, "tokens_rejected_share": ~corrected.kept}.items():
            self._add(name, values)
        per_token = per_token + self._penalties(pack, outputs, corrected)
        self._measure(pack, logprobs, proximal, corrected)
        weights = targets.episode_weights[episode].to(per_token.dtype)
        # `logprobs.sum() * 0` keeps the graph where no token is kept: the other ranks' backward waits for this one's.
        return (per_token * weights).sum() if len(trained) else outputs.logprobs.sum() * 0

    def _targets_on(self, device: torch.device) -> Targets:
        self._targets = self._targets.to(device)
        return self._targets

    def _corrected(self, inputs: CorrectionInput) -> Corrected:
        if self._correction is not None:
            return self._correction(inputs)
        ones = torch.ones_like(inputs.proximal)
        return Corrected(ones, ones.bool())

    def _penalties(self, pack: Pack, outputs: Outputs, corrected: Corrected) -> Tensor:
        """[T] coefficients · KL to reference and teacher − bonus · entropy"""
        logprobs = outputs.logprobs[pack.trained]
        total = torch.zeros_like(logprobs)
        if pack.reference is not None:
            kl = ESTIMATORS[self._config.kl.estimator](logprobs - pack.reference[pack.trained])
            self._add("kl_reference", kl)
            if self._config.kl.in_loss:  # 0 · inf would spoil the loss of a step that has the KL in its rewards
                total = total + self._config.kl.in_loss * kl
        if pack.teacher is not None:
            total = total + self._teacher_loss(pack, outputs, corrected)
        if outputs.entropy is not None:
            entropy = outputs.entropy[pack.trained]
            self._add("entropy", entropy)
            total = total - self._config.entropy_bonus * entropy
        return total

    def _teacher_loss(self, pack: Pack, outputs: Outputs, corrected: Corrected) -> Tensor:
        """[T] see `distillation`"""
        assert pack.teacher is not None
        config, teacher = self._config.distill, pack.teacher[pack.trained]
        gap = teacher_gap(outputs.logprobs[pack.trained], teacher, config.clip, keep_slope=config.estimator == "k2")
        self._add("teacher_kl", gap, ~teacher.isnan())
        if not config.in_loss:
            return torch.zeros_like(gap)
        weights = torch.where(corrected.kept, corrected.weights, 0.0)
        estimated = weights * ESTIMATORS[config.estimator](gap)
        if outputs.coarse is None:
            return config.in_loss * estimated
        assert pack.top_ids is not None
        assert pack.top_logprobs is not None
        ids, student = pack.top_ids[pack.trained], outputs.coarse[pack.trained]
        coarse = teacher_coarse(ids, pack.top_logprobs[pack.trained])
        has_top = (ids >= 0).any(-1)
        divergence = coarse_divergence(student, coarse, config)
        self._add("teacher_divergence", divergence, has_top)
        self._add("teacher_top_mass", top_mass(coarse), has_top)
        self._add("student_top_mass", top_mass(student), has_top)
        computed = torch.where(corrected.kept, divergence, 0.0)
        return config.in_loss * torch.where(has_top, computed, estimated)

    def _measure(self, pack: Pack, logprobs: Tensor, proximal: Tensor, corrected: Corrected) -> None:
        """The mismatch between trainer and engine, always: against the start of the step, whatever `proximal` is."""
        trained = pack.trained
        start = logprobs.detach() if pack.proximal is None else pack.proximal[trained]
        difference = (start - pack.behaviour[trained]).double()
        ratio = difference.exp()
        self._tally.add_tensor("logprob_abs_diff", difference.abs(), pack.same_version[trained])
        measured = {
            "logprob_abs_diff_all": difference.abs(),
            "kl_k3": ratio - 1 - difference,
            "is_ratio": ratio,
            "is_ratio_squared": ratio.square(),
            "is_weight": torch.where(corrected.kept, corrected.weights, 0.0),
            "staleness": pack.staleness[trained],
            "policy/kl_proximal": proximal - logprobs.detach(),
        }
        for name, values in measured.items():
            self._tally.add_tensor(name, values)

    def _add(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        self._tally.add_tensor(f"policy/{name}", values, where)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """All [N] → [N]; only `values` carries a gradient."""
    near = torch.clamp(values, old - clip, old + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


def trained_tokens(packs: Sequence[Pack], episodes: int) -> Tensor:
    """[E] int64, trained tokens of each episode of this rank in `packs`"""
    counts = torch.zeros(episodes, dtype=torch.long)
    for pack in packs:
        counts += torch.bincount(pack.episode[pack.trained], minlength=episodes)
    return counts


def episode_weights(aggregation: str, tokens: Tensor) -> Tensor:
    """tokens [E] → [E] float64, the weight of each token of an episode"""
    if aggregation == "episode_mean":
        return 1.0 / tokens.clamp(min=1).double()
    return torch.ones(len(tokens), dtype=torch.float64)


def divisor(aggregation: str, tokens: float, episodes: float, length: int) -> float:
    """D from the trained tokens and the episodes that have any, of all ranks."""
    if aggregation == "token_mean":
        return tokens
    return episodes * length if aggregation == "constant" else episodes


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """All [M] → (A − mean A)(logπ − mean logπ), [M]"""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def select_tokens(
    config: TrainerConfig, packs: Sequence[Pack], advantages: Tensor, group: Tensor, *, step: int, ranks: Ranks
) -> Tensor | None:
    """advantages [N], group [E] of each episode as in `StepBatch` → [N] bool; None where the loss has no choice to
    make. A collective."""
    loss = LOSSES.get(config.loss)
    choose = getattr(loss, "choose", None)
    if choose is None:
        return None
    mine = torch.zeros_like(advantages, dtype=torch.bool)
    logprobs, groups = torch.zeros_like(advantages), torch.zeros_like(advantages)
    for pack in packs:
        assert pack.proximal is not None, "a loss that chooses is scored first"
        mine[pack.token[pack.trained]] = True
        logprobs[pack.token] = pack.proximal.double()
        groups[pack.token] = group[pack.episode].double()
    parts = ranks.gather_numbers(torch.stack([advantages[mine], logprobs[mine], groups[mine]]))
    everything = torch.cat(parts, dim=1)
    # One order on any number of ranks: each group is one rank's, its tokens in the order of the batch.
    order = everything[2].argsort(stable=True)
    # The same draw on every rank, and again when a step is replayed.
    generator = torch.Generator().manual_seed(step)
    options = {**options_of(loss), **config.loss_options}
    settings = {name: options[name] for name in options_of(choose)}
    ordered = everything[:, order]
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order] = choose(covariances(ordered[0], ordered[1]), generator, **settings)
    start = sum(part.shape[1] for part in parts[: ranks.rank])
    mine[mine.clone()] = chosen[start : start + int(mine.sum())]
    return mine


def proximal_logprobs(method: str, pack: Pack, logprobs: Tensor) -> Tensor:
    """[N] of `pack`, without gradient; `logprobs` [N] are those of the forward under way."""
    if method == "behaviour":
        return pack.behaviour
    if method == "interpolated":
        share = pack.staleness / (pack.staleness + 1)
        return pack.behaviour + share * (logprobs.detach() - pack.behaviour)
    return logprobs.detach() if pack.proximal is None else pack.proximal


def k1(difference: Tensor) -> Tensor:
    return difference


def k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    return (-difference).exp() - 1 + difference


def low_variance(difference: Tensor) -> Tensor:
    return k3(difference.clamp(-20, 20)).clamp(-10, 10)


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_variance": low_variance}


def steered(coefficient: float, measured: float, target: float | None, episodes: int, horizon: int) -> float:
    """The next coefficient: coefficient · (1 + clip(measured / target − 1, ±0.2) · episodes / horizon).

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), section 2.2.
    """
    if target is None:
        return coefficient
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * episodes / horizon)
