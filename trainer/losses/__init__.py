"""Policy losses: one number per sampled token. One file each; the sum over tokens and ranks is the engine's work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.trainer.registry import Registry


@dataclass(frozen=True, slots=True)
class LossInput:
    """N sampled tokens of one micro-batch. Only `logprobs` carries a gradient."""

    logprobs: Tensor
    """[N] of the policy that is being optimised"""
    proximal: Tensor
    """[N] of the policy at the start of the step"""
    advantages: Tensor
    """[N] of the token's episode"""
    weights: Tensor
    """[N] off-policy correction"""
    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True)
class TokenLoss:
    per_token: Tensor
    """[N] to be minimised"""
    metrics: Mapping[str, Tensor]
    """name → [N], averaged over trained tokens"""


Loss = Callable[[LossInput], TokenLoss]

LOSSES: Registry[Loss] = Registry("policy loss", "penstock.trainer.losses")
