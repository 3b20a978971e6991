"""From logprobs to the loss of a pack: correction, policy loss, KL and entropy, each token times its weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.trainer.config import TrainerConfig
from penstock.trainer.corrections import CORRECTIONS, Corrected, CorrectionInput
from penstock.trainer.kl import ESTIMATORS
from penstock.trainer.losses import LOSSES, LossInput
from penstock.trainer.packing import Pack
from penstock.trainer.policy import Outputs
from penstock.trainer.proximal import proximal_logprobs
from penstock.trainer.tally import Tally


@dataclass(frozen=True, slots=True)
class Targets:
    """What a rank's minibatch is trained towards. N counts the rank's sampled tokens, E its episodes."""

    advantages: Tensor
    """[N] float32"""
    episode_weights: Tensor
    """[E] float64, the loss of each token counts this often: aggregation times filter"""
    chosen: Tensor | None = None
    """[N] bool, see `losses.Choice`"""


class Objective:
    """The engine's `PackLoss` for one minibatch; tallies what is measured on the way."""

    def __init__(self, config: TrainerConfig, targets: Targets, tally: Tally) -> None:
        self._config = config
        self._targets = targets
        self._tally = tally
        self._loss = LOSSES.bind(config.loss, config.loss_options)
        self._correction = CORRECTIONS.bind(config.correction, config.correction_options) if config.correction else None

    def __call__(self, pack: Pack, outputs: Outputs) -> Tensor:
        # Tokens that are not trained on are left out here, not multiplied by 0: 0 · inf would still spoil the gradient.
        kept = pack.mask
        behaviour, logprobs = pack.behaviour[kept], outputs.logprobs[kept]
        proximal = proximal_logprobs(self._config.proximal, pack, outputs.logprobs)[kept]
        corrected = self._corrected(CorrectionInput(proximal, behaviour, pack.segment[kept]))
        given = LossInput(
            logprobs,
            proximal,
            behaviour,
            self._of_tokens(self._targets.advantages, pack.token[kept]),
            corrected.weights,
            pack.segment[kept],
            self._of_tokens(self._targets.chosen, pack.token[kept]) if self._targets.chosen is not None else None,
        )
        result = self._loss(given)
        per_token = torch.where(corrected.kept, result.per_token, 0.0)
        metrics = {"loss": per_token, **result.metrics, "tokens_rejected_share": ~corrected.kept}
        per_token = per_token + self._penalties(pack, outputs, metrics)
        self._measure(pack, logprobs, proximal, corrected)
        self._add(metrics)
        weights = self._targets.episode_weights.to(logprobs.device)[pack.episode[kept]].to(per_token.dtype)
        # `logprobs.sum() * 0` keeps the graph where no token is kept: the other ranks' backward waits for this one's.
        return (per_token * weights).sum() if bool(kept.any()) else outputs.logprobs.sum() * 0

    def _of_tokens(self, values: Tensor, token: Tensor) -> Tensor:
        return values.to(token.device)[token]

    def _corrected(self, given: CorrectionInput) -> Corrected:
        if self._correction is None:
            ones = torch.ones_like(given.proximal)
            return Corrected(ones, ones.bool())
        return self._correction(given)

    def _penalties(self, pack: Pack, outputs: Outputs, metrics: dict[str, Tensor]) -> Tensor:
        """[kept] coefficient · KL − bonus · entropy"""
        total = torch.zeros_like(outputs.logprobs[pack.mask])
        if pack.reference is not None:
            difference = outputs.logprobs[pack.mask] - pack.reference[pack.mask]
            metrics["kl_reference"] = ESTIMATORS[self._config.kl.estimator](difference)
            total = total + self._config.kl.in_loss * metrics["kl_reference"]
        if outputs.entropy is not None:
            metrics["entropy"] = outputs.entropy[pack.mask]
            total = total - self._config.entropy_bonus * metrics["entropy"]
        return total

    def _measure(self, pack: Pack, logprobs: Tensor, proximal: Tensor, corrected: Corrected) -> None:
        """The mismatch between trainer and engine, always: against the start of the step, whatever `proximal` is."""
        behaviour = pack.behaviour[pack.mask]
        start = logprobs.detach() if pack.proximal is None else pack.proximal[pack.mask]
        difference = (start - behaviour).double()
        ratio = difference.exp()
        measured = {
            "logprob_abs_diff": difference.abs()[pack.same_version[pack.mask]],
            "logprob_abs_diff_all": difference.abs(),
            "kl_k3": ratio - 1 - difference,
            "is_ratio": ratio,
            "is_ratio_squared": ratio.square(),
            "is_weight": torch.where(corrected.kept, corrected.weights, 0.0),
            "staleness": pack.staleness[pack.mask],
            "policy/kl_proximal": (proximal - logprobs.detach()),
        }
        for name, values in measured.items():
            self._tally.add(name, values.double().cpu().numpy())

    def _add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, values in metrics.items():
            self._tally.add(f"policy/{name}", values.detach().double().cpu().numpy())
