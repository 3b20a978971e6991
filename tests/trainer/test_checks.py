"""Jobs that cannot be right are refused before anything is loaded: the message names the setting and the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer_support import make_job

from penstock.trainer import TrainerConfig, check_algorithm, check_job
from penstock.trainer.advantages import ADVANTAGES, needs_of

pytestmark = pytest.mark.torch
SILENT = {"limits": {"filter_groups": "zero_variance"}}
SPIN = {"loss": "spin", "aggregation": "episode_sum", "advantage": "gae"}
ALGORITHMS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"advantage": "grop"}, {}, "'grop'; did you mean 'grpo'"),
    ({"loss": "decoupled-ppo"}, {}, r"unknown policy loss 'decoupled-ppo'; did you mean 'decoupled_ppo'\?"),
    ({"filter": "pf_pp"}, {}, "unknown episode filter 'pf_pp'; did you mean 'pf_ppo'"),
    ({"loss_options": {"clip": 0.1}}, {}, "has no setting 'clip'"),
    ({"correction_options": {"level": "word"}}, {}, "setting level is 'word'"),
    ({"critic": {"warmup_steps": 3}}, {}, r"warmup_steps is 3, and trainer\.advantage=grpo has no critic"),
    ({"aggregation": "constant"}, {}, r"divides by trainer\.aggregation_length, which is 0"),
    ({"kl": {"target": 6.0}}, {}, r"steers trainer\.kl\.in_reward, which is 0"),
    ({"proximal": "behaviour"}, {}, "leaves nothing for a correction"),
    ({"correction": None}, {}, r"max_staleness is 1 and trainer\.correction is null"),
    ({"loss": "sppo"}, {}, r"set trainer\.aggregation=episode_sum"),
    ({"loss": "spin", "aggregation": "episode_mean"}, {}, r"set trainer\.aggregation=episode_sum"),
    (SPIN, {"limits": {"group_size": 1}}, "group_size to 2"),
    ({"sources": {"a": {"advantage": "gae"}}}, {}, r"trainer\.sources\.a\.advantage=gae needs a critic"),
    ({"advantage": "gae", "sources": {"a": {"advantage": "grpo"}}}, {}, r"trainer\.advantage=gae needs a critic"),
    ({"sources": {"a": {"advantage": "grp"}}}, {}, "grpo"),
    ({"sources": {"a": {"advantage": "grpo", "advantage_options": {"gama": 1}}}}, {}, "gama"),
    ({"sources": {"a": {"advantage_options": {"gamma": 1}}}}, {}, "name it as well"),
    ({"sources": {"a": {"group_size": 1}}}, {}, r"trainer\.sources\.a\.group_size is 1, and trainer\.advantage=grpo"),
    ({"sources": {"a": {"group_size": 0}}}, {}, "greater than or equal to 1"),
    ({"sources": {"a": {"advantage": "rloo", "group_size": 1}}}, {}, "compares the episodes of one task"),
    (
        {"advantage": "reinforce_plus_plus", "sources": {"a": {"advantage": "grpo"}}},
        {"limits": {"group_size": 1}},
        "set group_size to 2 or more",
    ),
    ({"turn_reward_weight": 0.5}, SILENT, r"filter_groups is zero_variance and trainer\.turn_reward_weight 0\.5"),
    ({"distill": {"in_loss": 1.0}}, SILENT, r"filter_groups is zero_variance and trainer\.distill"),
    ({}, {**SILENT, "data": {"curriculum": {}}}, r"filter_groups is zero_variance and data\.curriculum"),
    (
        {"sources": {"x": {"advantage": "reinforce_plus_plus", "group_size": 1}}},
        SILENT,
        r"trainer\.sources\.x\.group_size 1",
    ),
    ({"distill": {"in_advantage": 1.0}}, {"top_k": (0, 20)}, r"top_k is 20 and trainer\.distill\.in_loss 0"),
    (
        {"distill": {"in_loss": 1.0}, "engine": "megatron"},
        {"top_k": (8,)},
        r"top_k is 8, and trainer\.engine megatron",
    ),
    ({"distill": {"in_loss": 1.0, "divergence": "jsd"}}, {"top_k": (8, 0)}, r"divergence is jsd, .* of every teacher"),
    ({"distill": {"divergence": "forward_kl"}}, {}, "divergence is forward_kl"),
]
RUNS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"minibatches": 3}, {}, r"trainer\.minibatches is 3, groups_per_step only 2"),
    ({"ranks": 3}, {}, r"trainer\.ranks is 3, groups_per_step only 2"),
    ({"stop": {"target": 0.5}, "eval_every": 1}, {}, r"trainer\.stop\.metric is eval/reward, and data\.eval is not"),
    ({"stop": {"target": 0.5}}, {"data": {"eval": "e"}}, r"stop\.metric is eval/reward, and trainer\.eval_every is 0"),
    ({"sinks": ("wandbb",)}, {}, "did you mean 'wandb'"),
    ({}, {"rollout": {"weight_transport": "http"}}, "need the run's token"),
    ({}, {"temperature": 0.0}, "must be sampled, not greedy"),
    ({"advantage": "remax"}, {"limits": {"branches": 1}}, r"remax has a greedy member, .* set agent\.forks=null"),
]
ENGINES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"engine": "megatrn"}, {}, "did you mean 'megatron'"),
    ({"ranks": 3, "parallel": {"tensor": 2}}, {}, r"trainer\.ranks is 3; one copy of the model takes 2"),
    ({"ranks": 12, "parallel": {"tensor": 2, "context": 2}}, {}, "groups_per_step only 2"),
    ({"ranks": 2, "parallel": {"pipeline": 2}}, {}, r"fsdp has no trainer\.parallel\.pipeline"),
    ({"ranks": 4, "parallel": {"replicate": 3}}, {}, r"parallel\.replicate is 3, which does not divide the 4"),
    (
        {"ranks": 4, "parallel": {"replicate": 4, "tensor": 2}},
        {},
        r"replicate is 4, .* the 2 copies .*each of 2 ranks",
    ),
    ({"ranks": 2, "parallel": {"tensor": 2}, "compile": True}, {}, r"trainer\.compile does not go with"),
    ({"lora": {"rank": 8, "targets": "experts"}, "compile": True}, {}, r"lora\.targets has experts, which go neither"),
    ({"compile": True, "recompute": "selective"}, {}, r"compile .* trainer\.recompute selective: set recompute to"),
    ({"activation_offload": True, "recompute": "selective"}, {}, "activation_offload .* selective .* set recompute to"),
    ({"engine": "megatron", "recompute": "selective"}, {}, "set it to true or false under megatron"),
    ({"engine": "megatron", "ranks": 2, "parallel": {"replicate": 2}}, {}, r"trainer\.parallel\.replicate is of"),
    ({"ranks": 6, "parallel": {"expert": 4}}, {}, r"expert is 4, which does not divide the 6 ranks .* set it to 2"),
    (
        {"ranks": 4, "parallel": {"expert": 4, "replicate": 2}},
        {},
        r"expert is 4, which does not divide the 2 ranks .*replicate 2\): set it to 2",
    ),
    ({"ranks": 4, "parallel": {"expert": 2, "tensor": 2}}, {}, r"expert is 2, .*tensor 2: set tensor to 1"),
    ({"ranks": 2, "parallel": {"expert": 2}, "compile": True}, {}, r"expert is 2: set trainer\.compile to false"),
    ({"ranks": 2, "parallel": {"expert": 2}, "activation_offload": True}, {}, r"expert is 2, .*set trainer\.recompute"),
    ({"engine": "megatron", "advantage": "gae"}, {}, "advantage=gae needs a critic"),
    ({"engine": "megatron", "lora": {"rank": 8}}, {}, r"lora\.rank is of trainer\.engine fsdp"),
    ({"engine": "megatron", "offload": True}, {}, r"offload is of trainer\.engine fsdp"),
    (
        {"engine": "megatron", "ranks": 4, "parallel": {"pipeline": 2, "expert": 4}},
        {},
        "expert is 4, which does not divide the 2 ranks",
    ),
    (
        {"engine": "megatron", "ranks": 2, "parallel": {"context": 2}, "dtype": "float32"},
        {},
        r"parallel\.context is 2 and trainer\.dtype float32",
    ),
]


def check(folder: Path, settings: dict[str, Any], more: dict[str, Any]) -> None:
    more = dict(more)
    limits, top_k = more.pop("limits", {}), more.pop("top_k", ())
    job = make_job(folder, "model", settings, **more)
    check_job(replace(job, limits=replace(job.limits, **limits), run=replace(job.run, teacher_top_k=top_k)))


@pytest.mark.parametrize(("settings", "more", "message"), [*ALGORITHMS, *RUNS, *ENGINES])
def test_what_cannot_be_right_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(tmp_path, settings, more)


@pytest.mark.parametrize("name", [n for n in ADVANTAGES.names() if {"groups", "greedy"} & needs_of(ADVANTAGES.get(n))])
def test_a_group_of_one_is_refused_where_groups_are_compared(name: str) -> None:
    with pytest.raises(ValueError, match=r"compares the episodes of one task, and group_size is 1"):
        check_algorithm(TrainerConfig(advantage=name), group_size=1)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"distill": {"in_loss": 1.0}}, {"top_k": (8, 0)}),
        (
            {"advantage": "reinforce_plus_plus", "sources": {"a": {"advantage": "grpo", "group_size": 4}}},
            {"limits": {"group_size": 1}},
        ),
        ({"recompute": "true"}, {}),
        ({"engine": "megatron", "ranks": 2, "parallel": {"context": 2}}, {}),  # its GPUs compute in bfloat16
    ],
)
def test_what_fits_together_is_taken(tmp_path: Path, settings: dict[str, Any], more: dict[str, Any]) -> None:
    check(tmp_path, settings, more)
