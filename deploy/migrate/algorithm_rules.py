"""Rules for the algorithm: verl's settings that only together make ours.

A rule yields (our key, value); `note` says what a person must know, `lose` that a value has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.deploy.migrate.run_rules import data
from penstock.deploy.migrate.settings import ACTOR, Given, Setting

LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
ADVANTAGES = ("gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "episode_mean",
    "seq-mean-token-sum": "episode_sum",
    "seq-mean-token-sum-norm": "constant",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_variance", "k3": "low_variance"}


def staleness(given: Given) -> Iterator[Setting]:
    yield "max_staleness", given.staleness
    if not given.is_async:
        given.note(
            "verl samples and trains in turns: max_staleness is 0. To overlap: max_staleness=fully_async and "
            "trainer.correction=truncated_is"
        )
    bypass = bool(given["algorithm.rollout_correction.bypass_mode"])
    if bypass and not given.staleness:
        yield "trainer.proximal", "behaviour"
        yield "trainer.correction", None
        return
    if bypass:
        given.note(
            "bypass_mode: here stale tokens are corrected (trainer.correction), the policy scored anew at each step"
        )
    yield from correction(given)


def correction(given: Given) -> Iterator[Setting]:
    section = "algorithm.rollout_correction"
    level, bound = given[f"{section}.rollout_is"], given[f"{section}.rollout_is_threshold"]
    if level is None:
        if given.staleness:
            given.note("stale tokens need an off-policy correction: truncated_is, which is the default here")
        else:
            yield "trainer.correction", None
        return
    bounds = [float(part) for part in str(bound).split("_")]
    yield "trainer.correction", "icepop" if len(bounds) == 2 else "truncated_is"
    yield "trainer.correction_options.level", level
    if len(bounds) == 2:
        yield "trainer.correction_options.low", bounds[0]
    yield f"trainer.correction_options.{'high' if len(bounds) == 2 else 'cap'}", bounds[-1]


def loss(given: Given) -> Iterator[Setting]:
    mode = given[f"{ACTOR}.policy_loss.loss_mode"]
    name = LOSSES.get(mode)
    if name is None:
        given.lose(
            f"{ACTOR}.policy_loss.loss_mode", f"{mode} is not here; its place is taken by ppo (docs/algorithms.md)"
        )
        name = "ppo"
    yield "trainer.loss", name
    yield from ((f"trainer.loss_options.{key}", value) for key, value in _loss_options(given, name).items())


def _loss_options(given: Given, name: str) -> dict[str, Any]:
    clips = {
        "clip_low": given.first(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
        "clip_high": given.first(f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"),
    }
    policy = f"{ACTOR}.policy_loss"
    by_loss = {
        "ppo": {**clips, "dual_clip": given[f"{ACTOR}.clip_ratio_c"]},
        "gspo": clips,
        "cispo": clips,
        "sapo": {"tau_positive": given[f"{ACTOR}.tau_pos"], "tau_negative": given[f"{ACTOR}.tau_neg"]},
        "clip_cov": {
            **clips,
            "share": given[f"{policy}.clip_cov_ratio"],
            "lower": given[f"{policy}.clip_cov_lb"],
            "upper": given[f"{policy}.clip_cov_ub"],
        },
        "kl_cov": {"share": given[f"{policy}.kl_cov_ratio"], "kl_weight": given[f"{policy}.ppo_kl_coef"]},
    }
    return by_loss[name]


def aggregation(given: Given) -> Iterator[Setting]:
    mode = given[f"{ACTOR}.loss_agg_mode"]
    name = AGGREGATIONS.get(mode)
    if name is None:
        given.lose(f"{ACTOR}.loss_agg_mode", f"{mode} is not here: token_mean")
        return
    yield "trainer.aggregation", name
    if name == "constant":
        yield "trainer.aggregation_length", int(given[f"{ACTOR}.loss_scale_factor"] or given.response)


def advantage(given: Given) -> Iterator[Setting]:
    theirs = given["algorithm.adv_estimator"]
    name = str(theirs).removesuffix("_vectorized")
    if name not in ADVANTAGES:
        given.lose("algorithm.adv_estimator", f"{theirs} is not here: grpo (docs/algorithms.md)")
        name = "grpo"
    if name == "grpo" and not given["algorithm.norm_adv_by_std_in_grpo"]:
        name = "dr_grpo"
    yield "trainer.advantage", name
    takes = {"gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",)}.get(name, ())
    for option in ("gamma", "lam"):
        value = given[f"algorithm.{option}"]
        if option in takes:
            yield f"trainer.advantage_options.{option}", value
        elif value != 1.0:
            given.lose(f"algorithm.{option}", f"{name} has no {option}: it is 1")
    if name == "gae":
        yield "trainer.critic.lr", given["critic.optim.lr"]
        yield "trainer.critic.clip", given["critic.cliprange_value"]
        yield "trainer.critic.warmup_steps", given["trainer.critic_warmup"]


def kl(given: Given) -> Iterator[Setting]:
    in_loss, in_reward = given[f"{ACTOR}.use_kl_loss"], given["algorithm.use_kl_in_reward"]
    named = {f"{ACTOR}.kl_loss_type": in_loss, "algorithm.kl_penalty": in_reward}
    for key in (key for key, used in named.items() if used):
        estimator = KL_ESTIMATORS.get(str(given[key]).removesuffix("+"))
        if estimator is None or str(given[key]).endswith("+"):
            given.lose(key, f"{given[key]} is not here: {estimator or 'k3'} with its own gradient")
        if estimator is not None:
            yield "trainer.kl.estimator", estimator
    if in_loss:
        yield "trainer.kl.in_loss", given[f"{ACTOR}.kl_loss_coef"]
    if in_reward:
        yield "trainer.kl.in_reward", given["algorithm.kl_ctrl.kl_coef"]
        if given["algorithm.kl_ctrl.type"] == "adaptive":
            yield "trainer.kl.target", given["algorithm.kl_ctrl.target_kl"]
            yield "trainer.kl.horizon", given["algorithm.kl_ctrl.horizon"]


def schedule(given: Given) -> Iterator[Setting]:
    steps = steps_of(given)
    optim = f"{ACTOR}.optim"
    warmup = int(given[f"{optim}.lr_warmup_steps"] or -1)
    share = float(given[f"{optim}.lr_warmup_steps_ratio"] or 0.0)
    if warmup > 0 or (share and steps):
        yield "trainer.warmup_steps", warmup if warmup > 0 else round(share * (steps or 0))
    elif share:
        given.lose(f"{optim}.lr_warmup_steps_ratio", "a share of an unknown number of steps: set trainer.warmup_steps")
    kind = given[f"{optim}.lr_scheduler_type"]
    if kind not in ("constant", "linear"):
        given.lose(f"{optim}.lr_scheduler_type", f"{kind} is not here: linear, to the same floor")
    if kind != "constant":
        yield "trainer.lr_schedule", "linear"
        yield "trainer.lr_floor", float(given[f"{optim}.min_lr_ratio"] or 0.0)
    clips = {given[key] for key in (f"{optim}.clip_grad", f"{ACTOR}.grad_clip") if given.gives(key)} or {1.0}
    if len(clips) > 1:
        given.note(f"clip_grad and grad_clip differ ({sorted(clips)}): the smaller one")
    yield "trainer.max_grad_norm", min(clips)
    if steps:
        yield "trainer.steps", steps


def steps_of(given: Given) -> int | None:
    """Steps in all; None where the data's rows would be needed and are not there."""
    if given["trainer.total_training_steps"]:
        return int(given["trainer.total_training_steps"])
    if given.is_async and given["rollout.total_rollout_steps"]:
        return max(1, int(given["rollout.total_rollout_steps"]) // given.groups_per_step)
    rows = _rows_of(dict(data(given)).get("data.train", ""))
    if rows is None:
        given.lose("trainer.total_epochs", "the training file is not here to be counted: set trainer.steps")
        return None
    return max(1, int(given["trainer.total_epochs"]) * rows // given.groups_per_step)


def _rows_of(path: str) -> int | None:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, pyarrow.ArrowException):
        return None


def filters(given: Given) -> Iterator[Setting]:
    if given["algorithm.use_pf_ppo"]:
        yield "trainer.filter", "pf_ppo"
        yield "trainer.filter_options.mode", given["algorithm.pf_ppo.reweight_method"]
        yield "trainer.filter_options.power", given["algorithm.pf_ppo.weight_pow"]
    if given["algorithm.filter_groups.enable"]:
        yield "transfer_queue.filter_groups", "zero_variance"
        yield "transfer_queue.max_filtered_steps", given["algorithm.filter_groups.max_num_gen_batches"]


ALGORITHM_RULES: tuple[Callable[[Given], Iterator[Setting]], ...] = (
    *(staleness, loss, aggregation, advantage, kl, schedule, filters),
)
