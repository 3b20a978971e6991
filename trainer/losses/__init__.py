"""Policy losses: one number per sampled token. One file each.

How the numbers become one (`aggregation`), the entropy bonus and the KL term (`objective`) are apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.common import Registry
from penstock.trainer.grouping import group_means
from penstock.trainer.lazy_torch import Tensor, torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """The input of a loss over whole episodes, for each of N tokens; the same for all tokens of an episode."""

    ratio: Tensor
    """[N] Σ (logπ − logπ_prox) over the trained tokens of the token's episode, at the start of this update"""
    tokens: Tensor
    """[N] the number of these tokens"""
    rival: Tensor
    """[N] `ratio` of the other episode of its pair; 0 if it is in none"""
    side: Tensor
    """[N] +1 for the better one of a pair, −1 for the worse one, 0 for the others"""


@dataclass(frozen=True, slots=True)
class LossInput:
    """N trained tokens of one micro-batch; segments are whole in it. Only `logprobs` carries a gradient."""

    logprobs: Tensor
    """[N] of the policy that is being optimised"""
    proximal: Tensor
    """[N] of the policy that the update must stay near, see trainer.proximal"""
    behaviour: Tensor
    """[N] the engine's, when it sampled"""
    advantages: Tensor
    """[N]"""
    weights: Tensor
    """[N] off-policy correction; 1 if there is none"""
    segment: Tensor
    """[N] int64 from 0: the segment of each token, the sequence of sequence-level losses"""
    chosen: Tensor | None = None
    """[N] bool, what the loss's `Choice` picked among all trained tokens of the minibatch; None if it has none"""
    sequences: Sequences | None = None
    """Sums over episodes, if the loss is registered with ``needs=("sequences",)``."""

    def of_sequences(self, value: Tensor, slope: Tensor) -> Tensor:
        """[N] numbers whose sum over an episode is `value`, and whose gradient is that of slope · Σ logπ; both [N], the
        same for all tokens of an episode. So an episode's loss does not depend on the packs that its tokens are in."""
        assert self.sequences is not None
        return value / self.sequences.tokens + slope * (self.logprobs - self.logprobs.detach())

    @property
    def ratio(self) -> Tensor:
        """[N] exp(logπ − logπ_prox), with the difference held within ±20: e²⁰ is finite and far beyond any clip."""
        return (self.logprobs - self.proximal).clamp(-20, 20).exp()

    def segment_means(self, values: Tensor) -> Tensor:
        """[N] → [N] the mean over each one's segment"""
        return group_means(values, self.segment)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    per_token: Tensor
    """[N] to be minimised"""
    metrics: Mapping[str, Tensor]
    """name → [N], averaged over trained tokens"""


Loss = Callable[..., TokenLoss]
"""``(LossInput, *, setting=default, …) → TokenLoss``; settings come from trainer.loss_options."""

Choice = Callable[..., Tensor]
"""``(covariance [M], generator, *, setting, …) → bool [M]`` over all trained
tokens of a minibatch on all ranks. A loss registered with ``choose=`` has one: it treats a few tokens in another way,
and which may not depend on micro-batches. covariance = (A − mean A)(logπ − mean logπ) at the start of the step; the
settings are those of the loss by name."""

LOSSES: Registry[Loss] = Registry("policy loss", package="penstock.trainer.losses")


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """−min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), and where the clip binds."""
    bounded = ratio.clamp(1 - low, 1 + high)
    binding = bounded * advantages < ratio * advantages
    metrics = {
        "clip_fraction_low": binding & (advantages < 0),
        "clip_fraction_high": binding & (advantages > 0),
    }
    return TokenLoss(-torch.minimum(ratio * advantages, bounded * advantages), metrics)
