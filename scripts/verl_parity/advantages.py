"""Advantage estimators. verl whitens inside an estimator, we after it: both are compared whitened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.trainer.ppo import core_algos

from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.credit import whitened
from verl_parity.inputs import Inputs, difference


class OneRank:
    """`Ranks` of this process alone, without a process group."""

    def sum(self, value: float) -> float:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


def ours(name: str, batch: Episodes, **options: Any) -> Advantages:
    return whitened(ADVANTAGES.bind(name, options)(batch), batch.trained, OneRank())  # type: ignore[arg-type]


def grouped(inputs: Inputs, name: str, theirs: str, **settings: Any) -> float:
    padded, _ = core_algos.get_adv_estimator_fn(theirs)(
        inputs.token_level_rewards, response_mask=inputs.mask, index=inputs.index, **settings
    )
    return difference(ours(name, inputs.episodes()).tokens, inputs.tokens(padded))


def gae(inputs: Inputs) -> float:
    values = inputs.values * inputs.mask
    padded, returns = core_algos.compute_gae_advantage_return(
        inputs.token_level_rewards, values, inputs.mask, 0.97, 0.9
    )
    found = ours("gae", inputs.episodes(values=inputs.tokens(values)), gamma=0.97, lam=0.9)
    assert found.returns is not None
    return max(difference(found.tokens, inputs.tokens(padded)), difference(found.returns, inputs.tokens(returns)))


def reinforce_plus_plus(inputs: Inputs) -> float:
    padded, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        inputs.token_level_rewards, inputs.mask, config=SimpleNamespace(gamma=0.98)
    )
    return difference(ours("reinforce_plus_plus", inputs.episodes(), gamma=0.98).tokens, inputs.tokens(padded))


def remax(inputs: Inputs) -> float:
    baselines = inputs.rewards.flip(0) / 2
    padded, _ = core_algos.compute_remax_outcome_advantage(inputs.token_level_rewards, baselines, inputs.mask)
    return difference(ours("remax", inputs.episodes(greedy=baselines)).tokens, inputs.tokens(padded))


def kl_controller(inputs: Inputs) -> float:
    from penstock.trainer.loss import steered

    theirs = core_algos.AdaptiveKLController(0.2, 6.0, 10_000)
    mine, worst = 0.2, 0.0
    for measured in inputs.values[0].abs().tolist():
        theirs.update(10 * measured, 256)
        mine = steered(mine, 10 * measured, 6.0, 256, 10_000)
        worst = max(worst, abs(mine - float(theirs.value)))
    return worst


def cases(seed: int) -> dict[str, float]:
    inputs, whole = Inputs.random(seed), Inputs.random(seed, holes=False)
    return {
        "gae": gae(inputs),
        "grpo": grouped(inputs, "grpo", "grpo"),
        "dr_grpo": grouped(inputs, "dr_grpo", "grpo", norm_adv_by_std_in_grpo=False),
        "rloo": grouped(inputs, "rloo", "rloo"),
        "opo": grouped(inputs, "opo", "opo"),
        # verl's sum starts again at every position that the environment wrote; ours is compared where there is none.
        "reinforce_plus_plus": reinforce_plus_plus(whole),
        "reinforce_plus_plus_baseline": grouped(inputs, "reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        "remax": remax(inputs),
        "kl controller": kl_controller(inputs),
    }
