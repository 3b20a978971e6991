"""The losses that a client of a training service may name, one number per position, all of them summed.

    lp = log p(target)    q = logprobs of the sampler    A = advantages    r = exp(lp − q)

    cross_entropy         −w · lp                              w = weights, 1 without
    importance_sampling   −r · A
    ppo                   −min(r · A, clip(r) · A)
    cispo                 −clip(r), without gradient · lp · A
    dro                   −(lp · A − β/2 · (lp − q)²)

clip(r) holds r between `clip_low_threshold` and `clip_high_threshold`. Tinker's documentation, "Loss functions"
(tinker-docs.thinkingmachines.ai/tinker/losses). No loss is divided by anything: the number of data scales gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.trainer.lazy_torch import Tensor, torch

Inputs = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class ClientLoss:
    """A loss by its formula: (lp [N], inputs and options by name, [N] each) → [N]."""

    formula: Callable[[Tensor, Inputs], Tensor]
    inputs: tuple[str, ...]
    """Names of tensors that a datum has besides `target_tokens`; a last one with a ``?`` may be missing."""
    options: Mapping[str, float]
    """Names and defaults of `loss_fn_config`. A tensor of that name in a datum wins."""


def cross_entropy(lp: Tensor, inputs: Inputs) -> Tensor:
    return -inputs["weights"] * lp


def importance_sampling(lp: Tensor, inputs: Inputs) -> Tensor:
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs) -> Tensor:
    ratio, advantages = _ratio(lp, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs) * advantages)


def cispo(lp: Tensor, inputs: Inputs) -> Tensor:
    return -_clipped(_ratio(lp, inputs), inputs).detach() * lp * inputs["advantages"]


def dro(lp: Tensor, inputs: Inputs) -> Tensor:
    return -(lp * inputs["advantages"] - inputs["beta"] / 2 * (lp - inputs["logprobs"]).square())


def _ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    """1 where the advantage is 0, as on prompts, whose q is no logprob: 0 · inf would spoil the sum."""
    return torch.where(inputs["advantages"] != 0, lp - inputs["logprobs"], 0.0).exp()


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    names = ("clip_low_threshold", "clip_high_threshold")
    low, high = (inputs[name].to(ratio) for name in names)
    return torch.minimum(torch.maximum(ratio, low), high)


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(cross_entropy, ("weights?",), {}),
    "importance_sampling": ClientLoss(importance_sampling, _POLICY, {}),
    "ppo": ClientLoss(ppo, _POLICY, _CLIP),
    "cispo": ClientLoss(cispo, _POLICY, _CLIP),
    "dro": ClientLoss(dro, _POLICY, {"beta": 0.05}),
}
