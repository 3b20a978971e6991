"""The proximal policy: what an update must stay near, and what the behaviour policy is corrected to.

    recomputed     the policy at the start of the step: the training forward itself with one minibatch, scored with more
    interpolated   logπ_prox = logπ_behave + s/(s + 1) · (logπ − logπ_behave),   s = the token's staleness
    behaviour      the engine's own logprobs: no correction is left to make

Decoupled PPO: Hilton et al. 2022 (arXiv:2110.00641). Interpolation: Li et al. 2025, "A-3PO: Accelerating Asynchronous
LLM Training with Staleness-aware Proximal Policy Approximation" (arXiv:2512.06547): a policy s versions ahead of the
one that sampled, on the way to the one that this step makes, s + 1 versions ahead. It spares a forward pass.
"""

from __future__ import annotations

from torch import Tensor

from penstock.trainer.packing import Pack


def proximal_logprobs(method: str, pack: Pack, logprobs: Tensor) -> Tensor:
    """[N] of `pack`, without gradient; `logprobs` [N] are those of the forward under way."""
    if method == "behaviour":
        return pack.behaviour
    if method == "interpolated":
        share = pack.staleness / (pack.staleness + 1)
        return pack.behaviour + share * (logprobs.detach() - pack.behaviour)
    return logprobs.detach() if pack.proximal is None else pack.proximal
