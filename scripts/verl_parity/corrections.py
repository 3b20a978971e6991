"""Off-policy corrections: weights, and which tokens are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper

from penstock.trainer.corrections import CORRECTIONS, CorrectionInput
from verl_parity.inputs import Inputs, difference

LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def ours(inputs: Inputs, name: str, **options: Any) -> Tensor:
    given = CorrectionInput(inputs.tokens(inputs.proximal), inputs.tokens(inputs.behaviour), inputs.row)
    found = CORRECTIONS.bind(name, options)(given)
    return torch.where(found.kept, found.weights, 0.0)


def weights(inputs: Inputs, level: str, threshold: str | float, name: str, **options: Any) -> float:
    padded, _ = rollout_corr_helper.compute_rollout_correction_weights(
        inputs.proximal - inputs.behaviour, inputs.mask, level, threshold
    )
    return difference(ours(inputs, name, level=level, **options), inputs.tokens(padded))


def rejected(inputs: Inputs, level: str) -> float:
    """verl's bounds are of π_behave / π_prox, ours of its inverse."""
    padded, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        inputs.proximal - inputs.behaviour, inputs.mask, LEVELS[level], "0.8_1.25"
    )
    return difference(ours(inputs, "rejection", level=level, low=0.8, high=1.25), inputs.tokens(padded))


def cases(seed: int) -> dict[str, float]:
    inputs = Inputs.random(seed, spread=0.2)
    return {
        "truncated_is, token": weights(inputs, "token", 1.2, "truncated_is", cap=1.2),
        "truncated_is, sequence": weights(inputs, "sequence", 1.2, "truncated_is", cap=1.2),
        "icepop, token": weights(inputs, "token", "0.8_1.3", "icepop", low=0.8, high=1.3),
        "icepop, sequence": weights(inputs, "sequence", "0.8_1.3", "icepop", low=0.8, high=1.3),
        "masked_is, token": weights(inputs, "token", "1e-12_1.3", "masked_is", cap=1.3),
        "masked_is, sequence": weights(inputs, "sequence", "1e-12_1.3", "masked_is", cap=1.3),
        **{f"rejection, {level}": rejected(inputs, level) for level in LEVELS},
    }
