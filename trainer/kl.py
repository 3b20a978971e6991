"""KL to the reference policy, estimated from the logprobs of sampled tokens, and the controller of its coefficient.

    d = logπ − logπ_ref
    k1 = d                        unbiased, may be negative
    k2 = d² / 2                   biased, its gradient is that of KL
    k3 = exp(−d) − 1 + d          unbiased, never negative
    low_variance                  k3 with d held within ±20 and the result within ±10

Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k3 is GRPO's, arXiv:2402.03300,
equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor


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
