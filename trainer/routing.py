"""How evenly a mixture's routers share out tokens, and how often they would have chosen others than the engine's did.

    load_e = how often expert e was chosen / tokens                 summed over ranks and the step's updates
    max over mean = max_e load_e / mean_e load_e                    1: even
    entropy = −Σ_e q_e · log q_e / log E,  q_e = load_e / Σ load    1: even, 0: one expert has all
    aux loss = E · Σ_e load_e · P_e                                 P_e: mean probability of e; k where both are even

Aux loss: Fedus et al. 2022, "Switch Transformers" (arXiv:2101.03961), equation 4, over all layers together, as
transformers' `load_balancing_loss_func` computes it, without the model's coefficient. It is measured and not learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.rollout_server import LayerLoad
from penstock.trainer.engine import RouterLoads
from penstock.trainer.ranks.distributed import Ranks


def router_metrics(loads: RouterLoads, ranks: Ranks) -> dict[str, float]:
    """A collective. Empty where no token was learned from."""
    summed: Tensor = sum(ranks.gather_numbers(torch.stack([_numbers(layer) for layer in loads.layers])))  # type: ignore[assignment]
    tokens, replayed, other = summed[:, -3:].T
    if not bool((tokens > 0).all()):
        return {}
    experts = (summed.shape[1] - 3) // 2
    load, probability = (part / tokens[:, None] for part in (summed[:, :experts], summed[:, experts:-3]))
    peaks = (load.amax(1) / load.mean(1)).tolist()
    entropies = [entropy_share(layer) for layer in load]
    found = {
        "moe/load_max_over_mean": max(peaks),
        "moe/load_entropy": min(entropies),
        **{f"moe/load_max_over_mean/{number}": peak for number, peak in enumerate(peaks)},
        **{f"moe/load_entropy/{number}": entropy for number, entropy in enumerate(entropies)},
        "moe/replayed": float(replayed.sum() / tokens.sum()),
        "moe/rerouted": float(other.sum() / replayed.sum()) if bool(replayed.sum() > 0) else 0.0,
    }
    if loads.has_aux_loss:
        found["moe/aux_loss"] = float(experts * (load.mean(0) * probability.mean(0)).sum())
    return found


def entropy_share(load: Tensor) -> float:
    """load [E] → its entropy over that of an even one"""
    share = load / load.sum()
    return float(-torch.special.xlogy(share, share).sum()) / math.log(len(load))


def _numbers(layer: LayerLoad) -> Tensor:
    """[2 · E + 3]"""
    return torch.cat([layer.chosen, layer.probability, layer.tokens]).cpu()
