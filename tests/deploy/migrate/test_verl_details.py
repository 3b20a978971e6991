"""Settings of verl whose meaning depends on other settings, and the messages about those without a counterpart."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.deploy.migrate.convert import Migration, migrate
from penstock.deploy.migrate.source import read_source

SHORT = ("data.train_files=train.parquet", "trainer.total_training_steps=10", "algorithm.adv_estimator=grpo")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RC, FILTER = "algorithm.rollout_correction", "algorithm.filter_groups"
DAPO = ("overlong_buffer_cfg.enable=true", "overlong_buffer_cfg.len=4096", "overlong_buffer_cfg.log=false")
LENDS = (
    *("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"),
    *("rollout.nnodes=1", "rollout.n_gpus_per_node=8"),
)
LENGTHS = ("data.max_prompt_length=1000", "data.max_response_length=3000")
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size=4"


def made(*overrides: str) -> Migration:
    migrated = migrate(read_source(None, [*SHORT, f"{ROLLOUT}.n=4", *overrides]))
    migrated.check()
    return migrated


def value(migrated: Migration, dotted: str) -> Any:
    node: Any = migrated.recipe
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def lost(migrated: Migration) -> dict[str, str]:
    return {one.key: one.why for one in migrated.account.unmapped}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [f"reward_model.reward_kwargs.{word}" for word in (*DAPO, "max_resp_len=20480")],
            {"trainer.overlong.length": 20480, "trainer.overlong.buffer": 4096},
        ),
        (
            [*(f"reward.reward_kwargs.{word}" for word in DAPO), "data.max_response_length=9000"],
            {"trainer.overlong.length": 9000},
        ),
        *(
            (
                [f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.loss_agg_mode={given}"],
                {"trainer.loss": mode, "trainer.aggregation": aggregation, "trainer.aggregation_length": None},
            )
            for mode, given, aggregation in (
                ("gspo", "token-mean", "episode_mean"),
                ("gspo", "seq-mean-token-sum-norm", "episode_mean"),
                ("sapo", "token-mean", "episode_mean"),
                ("cispo", "token-mean", "token_mean"),
            )
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo"], {"trainer.aggregation": "episode_mean"}),
        ([f"{ACTOR}.policy_loss.loss_mode=clip-cov"], {"trainer.loss": "clip_cov", "trainer.loss_options.upper": 5.0}),
        ([f"{ACTOR}.policy_loss.loss_mode=kl_cov"], {"trainer.loss": "kl_cov", "trainer.loss_options.clip_low": None}),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=20480", ULYSSES], {"trainer.micro_batch_tokens": 81920}),
        ([ULYSSES], {"trainer.micro_batch_tokens": 65536, "trainer.parallel.context": 4}),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", *LENGTHS],
            {"trainer.micro_batch_tokens": 16000},
        ),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", *LENGTHS, ULYSSES], {"trainer.micro_batch_tokens": 16000}),
        ([f"{ACTOR}.ppo_micro_batch_size=64", *LENGTHS], {"trainer.micro_batch_tokens": 32000}),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", *LENGTHS],
            {"trainer.micro_batch_tokens": 16384},
        ),
        *(
            (
                [f"{RC}.rollout_rs={theirs}", f"{RC}.rollout_rs_threshold={bounds}"],
                {
                    "trainer.correction": "rejection",
                    "trainer.correction_options": {"level": level, "low": low, "high": high},
                },
            )
            for theirs, bounds, level, low, high in (
                ("token_k1", "0.5_2.0", "token", 0.5, 2.0),
                ("seq_sum_k1", "4", "sequence", 0.25, 4.0),
                ("seq_mean_k1", "0.8_2.0", "geometric", 0.5, 1.25),  # verl's ratio is the engine's over the trainer's
            )
        ),
        (["trainer.v1.trainer_mode=fully_async"], {"max_staleness": 0}),
        (
            ["data.max_response_length=20480"],
            {
                "rollout.request_timeout_s": 2048.0,
                "agent.episode_deadline_s": 4096.0,
                "trainer.batch_timeout_s": 8192.0,
            },
        ),
        (["data.max_response_length=1024"], {"rollout.request_timeout_s": None}),
        ([*LENGTHS, f"{ROLLOUT}.response_length=8192"], {"agent.max_response_tokens": 8192}),
        (
            [
                f"{FILTER}.enable=true",
                f"{FILTER}.max_num_gen_batches=10",
                "data.gen_batch_size=1536",
                "data.train_batch_size=512",
            ],
            {"transfer_queue.max_filtered_steps": 30},
        ),
        (["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_config.fsdp_size=2"], {"trainer.parallel.replicate": 2}),
        (["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_config.fsdp_size=8"], {"trainer.parallel.replicate": None}),
    ],
)
def test_settings_that_make_one_together(words: list[str], expected: dict[str, Any]) -> None:
    migrated = made(*words)
    assert {key: value(migrated, key) for key in expected} == expected
    assert "trainer.v1.trainer_mode" in words[0] or lost(migrated) == {}


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (
            [f"{FILTER}.enable=true", f"{FILTER}.metric=acc"],
            f"{FILTER}.metric",
            "have the reward return acc as its score",
        ),
        (
            [f"{RC}.rollout_is=token", f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=2"],
            f"{RC}.rollout_rs",
            "rollout_is is kept",
        ),
        ([f"{RC}.rollout_rs=token_k3", f"{RC}.rollout_rs_threshold=2"], f"{RC}.rollout_rs", "token_k1"),
        (
            [f"{RC}.bypass_mode=true", f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=2"],
            f"{RC}.rollout_rs",
            "no correction is made",
        ),
        (["trainer.v1.trainer_mode=fully_async"], "trainer.v1.trainer_mode", "sync is used instead"),
        (
            ["data.filter_overlong_prompts=true"],
            "data.filter_overlong_prompts",
            "no row is left out here; filter the file",
        ),
        (
            [f"{ROLLOUT}.agent.default_agent_loop=mine"],
            f"{ROLLOUT}.agent.default_agent_loop",
            "single_turn is used instead",
        ),
        ([f"{ACTOR}.strategy=veomni"], f"{ACTOR}.strategy", "veomni is not here; fsdp is used instead"),
        (
            ["trainer.total_epochs=3", "~trainer.total_training_steps"],
            "trainer.total_epochs",
            "without it the run has 40",
        ),
        (["trainer.log_val_generations=4"], "trainer.log_val_generations", "trainer.wandb.samples"),
    ],
)
def test_what_is_not_taken_over_is_told_with_what_happens_instead(words: list[str], key: str, why: str) -> None:
    assert why in lost(made(*words))[key]


@pytest.mark.parametrize("metric", ["score", "seq_reward", "reward"])
def test_the_reward_is_the_metric_of_the_filter(metric: str) -> None:
    assert lost(made(f"{FILTER}.enable=true", f"{FILTER}.metric={metric}")) == {}
    assert lost(made(f"{FILTER}.metric=acc")) == {}, "nothing is filtered"


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=10"],
            f"{ACTOR}.clip_ratio_c",
            "gspo has no such",
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean"],
            f"{ACTOR}.loss_agg_mode",
            "always",
        ),
        ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"], f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "packs"),
        (["trainer.rollout_data_dir=x"], "trainer.rollout_data_dir", "penstock archive"),
        (["trainer.use_v1=true"], "trainer.use_v1", "max_staleness and placement"),
        (["transfer_queue.enable=true"], "transfer_queue.enable", "its own queue"),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            "counts tokens",
        ),
    ],
)
def test_what_need_not_be_set_has_its_own_reason(words: list[str], key: str, why: str) -> None:
    assert why in made(*words).account.ignored[key]


@pytest.mark.parametrize(
    ("words", "said", "unsaid"),
    [
        (["data.max_response_length=20480"], "an answer may take 2048 s here", "lend"),
        ([f"{ROLLOUT}.multi_turn.enable=true"], "agent.max_turns is 8", "lend"),
        (
            [*LENDS, "trainer.v1.separate_async.parameter_sync_step=2"],
            "published once per step, after its 4 upd",
            "colocated",
        ),
        ([*LENDS], "placement.lend=false rollout.servers=0", "placement.colocated"),
        (["trainer.n_gpus_per_node=4"], "placement.colocated=true trainer.ranks=4 rollout.servers=2", "lend"),
        (["model_engine=megatron"], "4 train and 4 sample", "placement.colocated"),
        ([f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"], "max_output_chars", "lend"),
        (["trainer.experiment_name=run-$(date +%F)"], "left out of the name", "lend"),
    ],
)
def test_notes_say_what_to_do(words: list[str], said: str, unsaid: str) -> None:
    notes = " ".join(made(*words).notes)
    assert (said in notes, unsaid in notes) == (True, False)


def test_keys_are_listed_under_those_of_the_engine() -> None:
    words = [*SHORT, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=4", "data.truncation=left"]
    done = CliRunner().invoke(app, ["config", "from-verl", "--all", *words])
    assert done.exit_code == 0, done.output
    assert "tensor_model_parallel_size → rollout.sglang_args.tp_size" in done.stderr
    assert "not taken over: data.truncation=left (prompts are never cut)" in done.stderr
    assert "# not taken over: data.truncation=left (prompts are never cut)" in done.stdout
