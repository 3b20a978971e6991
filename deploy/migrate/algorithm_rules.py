"""Rules for the algorithm: verl's settings that only together make ours.

A rule yields (our key, value); `note` says what a person must know, `lose` that a value has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.deploy.migrate.run_rules import data
from penstock.deploy.migrate.settings import ACTOR, ONE_STEP_OFF, PROGRAM, V1_MODES, Setting, VerlSettings

CORRECTION = "algorithm.rollout_correction"

_CLIPS: dict[str, tuple[str, ...]] = {
    "clip_low": ("clip_ratio_low", "clip_ratio"),
    "clip_high": ("clip_ratio_high", "clip_ratio"),
}
LOSSES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "vanilla": ("ppo", {**_CLIPS, "dual_clip": ("clip_ratio_c",)}),
    "gspo": ("gspo", _CLIPS),
    "cispo": ("cispo", _CLIPS),
    "sapo": ("sapo", {"tau_positive": ("tau_pos",), "tau_negative": ("tau_neg",)}),
    "clip_cov": (
        "clip_cov",
        {
            **_CLIPS,
            "share": ("policy_loss.clip_cov_ratio",),
            "lower": ("policy_loss.clip_cov_lb",),
            "upper": ("policy_loss.clip_cov_ub",),
        },
    ),
    "kl_cov": ("kl_cov", {"share": ("policy_loss.kl_cov_ratio",), "kl_weight": ("policy_loss.ppo_kl_coef",)}),
}
"""verl's loss → ours, and its settings: our name → verl's below actor, of which the first that is given counts."""
LEVELS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
"""verl's rejections by a ratio → the level of ours."""
ADVANTAGES = ("gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def staleness(verl: VerlSettings) -> Iterator[Setting]:
    if verl["trainer.v1.trainer_mode"] not in (None, *V1_MODES):
        verl.lose(
            "trainer.v1.trainer_mode",
            f"not a mode of verl that is known here ({', '.join(V1_MODES)}); sync is used instead",
        )
    if verl.has(PROGRAM) and ONE_STEP_OFF not in str(verl[PROGRAM]):
        verl.lose(PROGRAM, "read as main_ppo: choose what it does beyond it (page 'Algorithms', trainer.loss)")
    yield "max_staleness", verl.staleness
    if verl.v1_mode != "sync":
        if verl["trainer.v1.sampler.max_off_policy_strategy"] == "drop":
            verl.note(
                "max_off_policy_strategy=drop: here no group is dropped for its age, since one starts only if it can "
                "still be trained in time"
            )
    elif not verl.is_async and not verl.staleness:
        verl.note(
            "verl samples and trains in turns: max_staleness is 0. To overlap: max_staleness=fully_async and "
            "trainer.correction=truncated_is"
        )
    bypass = bool(verl[f"{CORRECTION}.bypass_mode"])
    if bypass and not verl.staleness:
        yield "trainer.proximal", "behaviour"
        yield "trainer.correction", None
        _lose_rejection(verl, "with bypass_mode no correction is made here")
        return
    if bypass:
        verl.lose(
            f"{CORRECTION}.bypass_mode",
            "stale tokens are scored anew at each step and corrected (trainer.correction) unless max_staleness is 0",
        )
    yield from correction(verl)


def correction(verl: VerlSettings) -> Iterator[Setting]:
    level, bound = verl[f"{CORRECTION}.rollout_is"], verl[f"{CORRECTION}.rollout_is_threshold"]
    rejects = verl[f"{CORRECTION}.rollout_rs"]
    if level is None and rejects in LEVELS:
        yield from _rejection(verl, LEVELS[rejects])
        return
    if rejects:
        reason = "one correction is possible here; rollout_is is kept"
        _lose_rejection(verl, reason if level else f"trainer.correction: rejection is {', '.join(LEVELS)} alone")
    if level is None:
        if verl.staleness:
            verl.note("stale tokens need an off-policy correction: truncated_is, which is the default here")
        else:
            yield "trainer.correction", None
        return
    bounds = [float(part) for part in str(bound).split("_")]
    yield "trainer.correction", "icepop" if len(bounds) == 2 else "truncated_is"
    yield "trainer.correction_options.level", level
    if len(bounds) == 2:
        yield "trainer.correction_options.low", bounds[0]
    yield f"trainer.correction_options.{'high' if len(bounds) == 2 else 'cap'}", bounds[-1]


def _lose_rejection(verl: VerlSettings, why: str) -> None:
    for key in (f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"):
        if verl[key] is not None:
            verl.lose(key, why)


def _rejection(verl: VerlSettings, level: str) -> Iterator[Setting]:
    """verl's bounds are those of the engine's probability over the trainer's, ours of the trainer's over the
    engine's; a single one is an upper bound and one over the lower."""
    bounds = [float(part) for part in str(verl[f"{CORRECTION}.rollout_rs_threshold"]).split("_")]
    yield "trainer.correction", "rejection"
    yield "trainer.correction_options.level", level
    yield "trainer.correction_options.low", 1 / bounds[-1]
    yield "trainer.correction_options.high", 1 / bounds[0] if len(bounds) == 2 else bounds[0]


def loss(verl: VerlSettings) -> Iterator[Setting]:
    mode = _loss_mode(verl)
    if mode not in LOSSES:
        verl.lose(f"{ACTOR}.policy_loss.loss_mode", f"{mode} is not here; ppo is used instead (page 'Algorithms')")
        mode = "vanilla"
    name, options = LOSSES[mode]
    yield "trainer.loss", name
    for option, keys in options.items():
        yield f"trainer.loss_options.{option}", verl.first(*(f"{ACTOR}.{key}" for key in keys))
    used = {key for keys in options.values() for key in keys}
    for key in {key for _, others in LOSSES.values() for keys in others.values() for key in keys} - used:
        verl.leave(f"{ACTOR}.{key}", f"the loss {name} has no such setting")


def _loss_mode(verl: VerlSettings) -> str:
    return str(verl[f"{ACTOR}.policy_loss.loss_mode"]).replace("-", "_")


def aggregation(verl: VerlSettings) -> Iterator[Setting]:
    mode, loss_mode = verl[f"{ACTOR}.loss_agg_mode"], _loss_mode(verl)
    if loss_mode in ("gspo", "sapo"):  # without regard to loss_agg_mode
        mode = "seq-mean-token-mean"
        for key in ("loss_agg_mode", "loss_scale_factor"):
            verl.leave(f"{ACTOR}.{key}", f"verl's {loss_mode} always takes the mean of sequences' means: episode_mean")
    names = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "episode_mean",
        "seq-mean-token-sum": "episode_sum",
        "seq-mean-token-sum-norm": "constant",
    }
    name = names.get(mode)
    if name is None:
        verl.lose(f"{ACTOR}.loss_agg_mode", f"{mode} is not here; token_mean is used instead")
        return
    yield "trainer.aggregation", name
    if name == "constant":
        yield "trainer.aggregation_length", int(verl[f"{ACTOR}.loss_scale_factor"] or verl.response)


def advantage(verl: VerlSettings) -> Iterator[Setting]:
    theirs = verl["algorithm.adv_estimator"]
    name = str(theirs).removesuffix("_vectorized")
    if name not in ADVANTAGES:
        verl.lose("algorithm.adv_estimator", f"{theirs} is not here; grpo is used instead (page 'Algorithms')")
        name = "grpo"
    if name == "grpo" and not verl["algorithm.norm_adv_by_std_in_grpo"]:
        name = "dr_grpo"
    yield "trainer.advantage", name
    takes = {"gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",)}.get(name, ())
    for option in ("gamma", "lam"):
        value = verl[f"algorithm.{option}"]
        if option in takes:
            yield f"trainer.advantage_options.{option}", value
        elif value != 1.0:
            verl.lose(f"algorithm.{option}", f"{name} has no {option}: it is 1")
    if name == "gae":
        yield "trainer.critic.lr", verl["critic.optim.lr"]
        yield "trainer.critic.clip", verl["critic.cliprange_value"]
        yield "trainer.critic.warmup_steps", verl["trainer.critic_warmup"]


def kl(verl: VerlSettings) -> Iterator[Setting]:
    in_loss, in_reward = verl[f"{ACTOR}.use_kl_loss"], verl["algorithm.use_kl_in_reward"]
    named = {f"{ACTOR}.kl_loss_type": in_loss, "algorithm.kl_penalty": in_reward}
    for key in (key for key, used in named.items() if used):
        if in_loss and key == "algorithm.kl_penalty" and verl[key] != verl[f"{ACTOR}.kl_loss_type"]:
            verl.lose(key, "one estimator serves reward and loss here: that of kl_loss_type")
            continue
        names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_variance", "k3": "low_variance"}
        estimator = names.get(str(verl[key]).removesuffix("+"))
        if estimator is None or str(verl[key]).endswith("+"):
            verl.lose(key, f"{verl[key]} is not here; {estimator or 'k3'} with its own gradient is used instead")
        if estimator is not None:
            yield "trainer.kl.estimator", estimator
    if in_loss:
        yield "trainer.kl.in_loss", verl[f"{ACTOR}.kl_loss_coef"]
    if in_reward:
        yield "trainer.kl.in_reward", verl["algorithm.kl_ctrl.kl_coef"]
        if verl["algorithm.kl_ctrl.type"] == "adaptive":
            yield "trainer.kl.target", verl["algorithm.kl_ctrl.target_kl"]
            yield "trainer.kl.horizon", verl["algorithm.kl_ctrl.horizon"]


def schedule(verl: VerlSettings) -> Iterator[Setting]:
    steps = steps_of(verl)
    optim = f"{ACTOR}.optim"
    warmup = int(verl[f"{optim}.lr_warmup_steps"] or -1)
    share = float(verl[f"{optim}.lr_warmup_steps_ratio"] or 0.0)
    if warmup > 0 or (share and steps):
        yield "trainer.warmup_steps", warmup if warmup > 0 else round(share * (steps or 0))
    elif share:
        verl.lose(f"{optim}.lr_warmup_steps_ratio", "a share of an unknown number of steps: set trainer.warmup_steps")
    key = next(one for one in (f"{optim}.warmup_style", f"{optim}.lr_scheduler_type") if verl[one])
    kind = verl[key]
    if kind not in ("constant", "linear"):
        verl.lose(key, f"{kind} is not here; linear is used instead, to the same floor")
    if kind != "constant":
        yield "trainer.lr_schedule", "linear"
        yield "trainer.lr_floor", float(verl[f"{optim}.min_lr_ratio"] or 0.0)
    clips = {verl[key] for key in (f"{optim}.clip_grad", f"{ACTOR}.grad_clip") if verl.has(key)} or {1.0}
    if len(clips) > 1:
        verl.note(f"clip_grad and grad_clip differ ({sorted(clips)}): the smaller one")
    yield "trainer.max_grad_norm", min(clips)
    if steps:
        yield "trainer.steps", steps


def steps_of(verl: VerlSettings) -> int | None:
    """Steps in all; None where the data's rows would be needed and are not there."""
    if verl["trainer.total_training_steps"]:
        return int(verl["trainer.total_training_steps"])
    if verl.is_async and verl["rollout.total_rollout_steps"]:
        return max(1, int(verl["rollout.total_rollout_steps"]) // verl.groups_per_step)
    rows = _rows_of(dict(data(verl)).get("data.train", ""))
    if rows is None:
        verl.lose(
            "trainer.total_epochs",
            "the training file is not here to be counted: set trainer.steps (rows × epochs / groups_per_step); without "
            "it the run has 40 steps",
        )
        return None
    if rows < verl.groups_per_step:
        verl.note(f"a step has {verl.groups_per_step} rows and the training file {rows}: its rows repeat in each step")
    return max(1, int(verl["trainer.total_epochs"]) * rows // verl.groups_per_step)


def _rows_of(path: str) -> int | None:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, pyarrow.ArrowException):
        return None


def filters(verl: VerlSettings) -> Iterator[Setting]:
    if verl["algorithm.use_pf_ppo"]:
        yield "trainer.filter", "pf_ppo"
        yield "trainer.filter_options.mode", verl["algorithm.pf_ppo.reweight_method"]
        yield "trainer.filter_options.power", verl["algorithm.pf_ppo.weight_pow"]
    if verl["algorithm.filter_groups.enable"]:
        yield "transfer_queue.filter_groups", "zero_variance"
        generated = int(verl["data.gen_batch_size"] or verl.groups_per_step)
        batches = int(verl["algorithm.filter_groups.max_num_gen_batches"] or 0)
        yield "transfer_queue.max_filtered_steps", -(-batches * generated // verl.groups_per_step)
        metric = verl["algorithm.filter_groups.metric"]
        if metric not in (None, "reward", "score", "seq_reward", "seq_final_reward"):  # the reward that decides here
            verl.lose(
                "algorithm.filter_groups.metric",
                f"groups of equal scores are left out here: have the reward return {metric} as its score",
            )


ALGORITHM_RULES: tuple[Callable[[VerlSettings], Iterator[Setting]], ...] = (
    *(staleness, loss, aggregation, advantage, kl, schedule, filters),
)
