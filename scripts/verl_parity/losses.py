"""Policy losses and aggregation: the scalar, and its gradient by every logprob."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from penstock.trainer.logprobs import entropies, target_logprobs
from penstock.trainer.loss import ESTIMATORS, covariances, divisor, episode_weights, value_loss
from penstock.trainer.losses import LOSSES, LossInput
from verl_parity.inputs import ROWS, Inputs, difference

drawn, largest = (getattr(LOSSES.get(name), "choose") for name in ("clip_cov", "kl_cov"))  # noqa: B009

MODES = {
    "token_mean": "token-mean",
    "episode_mean": "seq-mean-token-mean",
    "episode_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
LENGTH = 32


def aggregated(inputs: Inputs, per_token: Tensor, mode: str) -> Tensor:
    counts = torch.bincount(inputs.row, minlength=ROWS)
    weights = episode_weights(mode, counts)[inputs.row]
    return (per_token * weights).sum() / divisor(mode, int(counts.sum()), int((counts > 0).sum()), LENGTH)


def policy_loss(
    inputs: Inputs,
    name: str,
    theirs: str,
    *,
    mode: str = "token_mean",
    options: dict[str, Any],
    config: dict[str, Any],
    chosen: Tensor | None = None,
) -> float:
    """The larger of the difference of losses and that of gradients, the latter times the number of tokens."""
    logprobs = inputs.logprobs.clone().requires_grad_()
    settings = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **config)
    weights = inputs.behaviour.exp()
    expected, _ = core_algos.get_policy_loss_fn(theirs)(
        old_log_prob=inputs.proximal,
        log_prob=logprobs,
        advantages=inputs.advantages,
        response_mask=inputs.mask,
        loss_agg_mode=MODES[mode],
        config=settings,
        rollout_is_weights=weights,
    )
    mine = inputs.tokens(inputs.logprobs).clone().requires_grad_()
    given = LossInput(
        mine,
        inputs.tokens(inputs.proximal),
        inputs.tokens(inputs.behaviour),
        inputs.tokens(inputs.advantages),
        inputs.tokens(weights),
        inputs.row,
        chosen,
    )
    found = aggregated(inputs, LOSSES.bind(name, options)(given).per_token, mode)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    (my_gradient,) = torch.autograd.grad(found, mine)
    return max(difference(found, expected), difference(my_gradient, inputs.tokens(gradient)) * len(mine))


def chosen_by(inputs: Inputs, choose: Any, **options: Any) -> Tensor:
    covariance = covariances(inputs.tokens(inputs.advantages), inputs.tokens(inputs.logprobs))
    return choose(covariance, torch.Generator().manual_seed(0), **options)


def aggregation(inputs: Inputs, mode: str) -> float:
    theirs = core_algos.agg_loss(inputs.values, inputs.mask, MODES[mode], loss_scale_factor=LENGTH)
    return difference(aggregated(inputs, inputs.tokens(inputs.values), mode), theirs)


def kl(inputs: Inputs, ours: str, theirs: str) -> float:
    padded = core_algos.kl_penalty(inputs.logprobs, inputs.reference, theirs)
    return difference(ESTIMATORS[ours](inputs.tokens(inputs.logprobs - inputs.reference)), inputs.tokens(padded))


def values(inputs: Inputs) -> float:
    theirs, _ = core_algos.compute_value_loss(inputs.values, inputs.logprobs, inputs.behaviour, inputs.mask, 0.5)
    given = [inputs.tokens(x) for x in (inputs.values, inputs.behaviour, inputs.logprobs)]
    return difference(value_loss(*given, 0.5).mean(), theirs)


def distributions(inputs: Inputs) -> dict[str, float]:
    logits = inputs.values[:, None, :].float()
    targets = torch.arange(ROWS) % logits.shape[-1]
    flat = logits.squeeze(1)
    return {
        "logprobs": difference(
            target_logprobs(flat, targets, 1.0), torch_functional.logprobs_from_logits_naive(flat, targets)
        ),
        "entropy": difference(entropies(flat, 1.0), torch_functional.entropy_from_logits(flat)),
    }


def cases(seed: int) -> dict[str, float]:
    inputs, near = Inputs.random(seed), Inputs.random(seed, spread=0.02)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    narrow = {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3}
    kl_cov = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=0.7)
    # verl draws with its own generator: all of the tokens within the bounds are drawn.
    clip_cov = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=2.0)
    within = {"share": 1.0, "lower": 0.2, "upper": 2.0}
    found = {
        f"ppo, {mode}": policy_loss(
            inputs,
            "ppo",
            "vanilla",
            mode=mode,
            options=bounds,
            config={**clips, "loss_scale_factor": LENGTH, "global_batch_info": {"loss_scale_factor": LENGTH}},
        )
        for mode in MODES
    }
    return {
        **found,
        "decoupled_ppo": policy_loss(
            inputs, "decoupled_ppo", "vanilla", options=bounds, config={**clips, "clip_ratio_c": 1e9}
        ),
        "gspo": policy_loss(
            inputs, "gspo", "gspo", mode="episode_mean", options={"clip_low": 3e-3, "clip_high": 4e-3}, config=narrow
        ),
        "cispo": policy_loss(inputs, "cispo", "cispo", options=bounds, config=clips),
        "sapo": policy_loss(
            inputs, "sapo", "sapo", mode="episode_mean", options={}, config={"tau_pos": 1.0, "tau_neg": 1.05}
        ),
        "kl_cov": policy_loss(
            inputs,
            "kl_cov",
            "kl_cov",
            options={"share": 0.1, "kl_weight": 0.7},
            config={"policy_loss": kl_cov},
            chosen=chosen_by(inputs, largest, share=0.1),
        ),
        "clip_cov": policy_loss(
            near,
            "clip_cov",
            "clip_cov",
            options=within,
            config={"policy_loss": clip_cov},
            chosen=chosen_by(near, drawn, **within),
        ),
        "reinforce": reinforce(inputs),
        "value loss": values(inputs),
        **{f"aggregation {mode}": aggregation(inputs, mode) for mode in MODES},
        "kl k1": kl(inputs, "k1", "k1"),
        "kl k2": kl(inputs, "k2", "k2"),
        # verl holds every k3 within ±10, we do under low_variance: k3 is compared where that does not bind.
        "kl k3": kl(near, "k3", "k3"),
        "kl low_variance": kl(inputs, "low_variance", "low_var_kl"),
        **distributions(inputs),
    }


def reinforce(inputs: Inputs) -> float:
    settings = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    weights = inputs.behaviour.exp()
    theirs, _ = core_algos.compute_policy_loss_reinforce(
        inputs.behaviour, inputs.logprobs, inputs.advantages, inputs.mask, "token-mean", settings, weights
    )
    given = [inputs.tokens(x) for x in (inputs.logprobs, inputs.proximal, inputs.behaviour, inputs.advantages, weights)]
    found = LOSSES.get("reinforce")(LossInput(*given, inputs.row)).per_token
    return difference(aggregated(inputs, found, "token_mean"), theirs)
