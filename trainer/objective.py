"""From logprobs to the loss of a pack: correction, then policy loss, over the tokens that are trained on.

Aggregation is the token mean over the whole step: sum over trained tokens / number of trained tokens on all ranks. An
episode's weight is thus its number of sampled tokens, however many segments they lie in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.config import TrainerConfig
from penstock.trainer.corrections import CORRECTIONS
from penstock.trainer.losses import LOSSES, LossInput
from penstock.trainer.packing import Pack
from penstock.trainer.tally import Tally


class Objective:
    """The engine's `PackLoss` for one step; tallies what is measured on the way."""

    def __init__(self, config: TrainerConfig, advantages: Tensor, tally: Tally) -> None:
        self._config = config
        self._advantages = advantages
        """[E] float32, by episode of the batch"""
        self._tally = tally
        self._loss = LOSSES.get(config.loss)
        self._correction = CORRECTIONS.get(config.correction) if config.correction else None

    def __call__(self, pack: Pack, logprobs: Tensor) -> Tensor:
        # Tokens that are not trained on are left out here, not multiplied by 0: 0 · inf would still spoil the gradient.
        kept = pack.mask
        proximal = (logprobs.detach() if pack.proximal is None else pack.proximal)[kept]
        behaviour = pack.behaviour[kept]
        weights = self._weights(proximal, behaviour)
        advantages = self._advantages.to(logprobs.device)[pack.episode[kept]]
        config = self._config
        given = LossInput(logprobs[kept], proximal, advantages, weights, config.clip_low, config.clip_high)
        result = self._loss(given)
        self._measure(pack, proximal, behaviour, weights)
        for name, values in {"loss": result.per_token, **result.metrics}.items():
            self._tally.add(name, values.detach().double().cpu().numpy())
        # `logprobs.sum() * 0` keeps the graph where no token is kept: the other ranks' backward waits for this one's.
        return result.per_token.sum() if bool(kept.any()) else logprobs.sum() * 0

    def _weights(self, proximal: Tensor, behaviour: Tensor) -> Tensor:
        if self._correction is None:
            return torch.ones_like(proximal)
        return self._correction(proximal, behaviour, self._config.correction_cap)

    def _measure(self, pack: Pack, proximal: Tensor, behaviour: Tensor, weights: Tensor) -> None:
        """The mismatch between trainer and engine, always."""
        staleness = pack.staleness[pack.mask]
        difference = (proximal - behaviour).double()
        ratio = difference.exp()
        measured = {
            "logprob_abs_diff": difference.abs()[pack.same_version[pack.mask]],
            "logprob_abs_diff_all": difference.abs(),
            "kl_k3": ratio - 1 - difference,
            "is_ratio": ratio,
            "is_ratio_squared": ratio.square(),
            "is_weight": weights,
            "staleness": staleness,
        }
        for name, values in measured.items():
            self._tally.add(name, values.double().cpu().numpy())
