"""verl's settings become a recipe, and no key of them is lost in silence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from penstock.deploy import RunConfig, app, load_config
from penstock.deploy.frameworks.table import ABSENT, verl_table
from penstock.deploy.migrate.convert import Migration, migrate
from penstock.deploy.migrate.source import BadSource, GivenSettings, read_source

ROOT = Path(__file__).parents[3]

PARITY = Path(os.environ.get("PENSTOCK_PARITY") or ROOT / ".venv-parity")
REAL = {
    "main_ppo": PARITY / "verl/trainer/config/_generated_ppo_trainer.yaml",
    "megatron": PARITY / "verl/trainer/config/_generated_ppo_megatron_trainer.yaml",
    "fully_async": PARITY / "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
}
SHORT = ("data.train_files=train.parquet", "trainer.total_training_steps=10", "actor_rollout_ref.rollout.name=vllm")


def made(*overrides: str) -> Migration:
    return migrate(read_source(None, [*SHORT, *overrides]))


def recipe(*overrides: str) -> RunConfig:
    return made(*overrides).check()


def assert_nothing_lost(given: GivenSettings, migrated: Migration) -> None:
    account = migrated.account
    parts = [set(account.mapped), {one.key for one in account.unmapped}, set(account.ignored)]
    assert set().union(*parts) == set(given.values)
    assert sum(map(len, parts)) == len(given.values), "each key is in one account"


# the table --------------------------------------------------------------------------------------------------------
def test_every_name_of_ours_is_a_key() -> None:
    for name in verl_table().names:
        if not name.ours:
            continue
        node: Any = RunConfig
        for part in name.ours.removesuffix(".*").split("."):
            if not hasattr(node, "model_fields"):
                break  # a mapping: its keys are an engine's or an algorithm's own
            assert part in node.model_fields, name.ours
            node = node.model_fields[part].annotation


def test_every_saved_name_of_verls_is_known() -> None:
    table = verl_table()
    assert len(table.known) > 400
    assert [key for key in sorted(table.known) if table.find(key) is None] == []


@pytest.mark.deep
@pytest.mark.parametrize("kind", sorted(REAL))
def test_verls_own_defaults_are_known_and_lose_nothing(kind: str) -> None:
    if not REAL[kind].is_file():
        pytest.skip(f"verl is not in {PARITY}: scripts/setup-parity fetches it")
    flat = read_source(REAL[kind], SHORT)
    migrated = migrate(flat)
    assert_nothing_lost(flat, migrated)
    assert [one for one in migrated.account.unmapped if "not a setting" in one.why] == []
    migrated.check()


@pytest.mark.deep
def test_the_tables_defaults_are_verls() -> None:
    if not REAL["main_ppo"].is_file():
        pytest.skip(f"verl is not in {PARITY}: scripts/setup-parity fetches it")
    flat = read_source(REAL["main_ppo"], ()).values
    rows = [name for name in verl_table().names if name.default != ABSENT and name.theirs in flat]
    assert len(rows) > 80
    differing = {name.theirs: (name.default, flat[name.theirs]) for name in rows if name.default != flat[name.theirs]}
    assert differing == {
        "actor_rollout_ref.rollout.name": ("vllm", "???"),
        "actor_rollout_ref.rollout.n_gpus_per_node": (None, 8),  # the trainer's, which the rule takes
    }


# conversions ------------------------------------------------------------------------------------------------------
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]
IS = "algorithm.rollout_correction.rollout_is"
MULTI = f"{ROLLOUT}.multi_turn"
SIZES = [
    *("data.val_files=[test.parquet]", "data.train_batch_size=64", "data.max_prompt_length=1024"),
    *("data.max_response_length=3072", f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_mini_batch_size=16"),
    *("actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct", "custom_reward_function.path=my_reward.py"),
    *("custom_reward_function.name=score", "trainer.experiment_name=my run 3B"),
    *("trainer.save_freq=25", "trainer.test_freq=5"),
]
CONVERSIONS: list[tuple[list[str], dict[str, Any]]] = [
    (
        SIZES,
        {
            **{"data.train": "train.parquet", "data.eval": "test.parquet", "model": "Qwen/Qwen2.5-3B-Instruct"},
            **{"groups_per_step": 64, "group_size": 8, "trainer.minibatches": 4, "max_staleness": 0},
            **{"agent.max_response_tokens": 3072, "rollout.max_model_len": 4096, "agent.reward": "my_reward.py:score"},
            **{"name": "my-run-3B", "trainer.checkpoint_every": 25, "trainer.eval_every": 5, "trainer.steps": 10},
            **{"trainer.betas": (0.9, 0.999), "trainer.weight_decay": 0.01},  # verl's defaults, not ours
        },
    ),
    ([], {"agent.reward": "by_data_source", "agent.loop": "single_turn", "agent.max_turns": 1}),
    (
        GRPO,
        {
            **{"trainer.advantage": "grpo", "trainer.loss": "ppo"},
            **{"trainer.correction": None, "trainer.proximal": "recomputed"},
        },
    ),
    ([*GRPO, "algorithm.norm_adv_by_std_in_grpo=false"], {"trainer.advantage": "dr_grpo"}),
    (["algorithm.adv_estimator=gae", "algorithm.lam=0.95"], {"trainer.advantage_options": {"gamma": 1.0, "lam": 0.95}}),
    (
        [*GRPO, f"{ACTOR}.clip_ratio_high=0.28"],
        {"trainer.loss_options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}},
    ),
    (
        [*GRPO, f"{ACTOR}.clip_ratio=0.1"],
        {"trainer.loss_options": {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0}},
    ),
    ([*GRPO, f"{ACTOR}.policy_loss.loss_mode=gspo"], {"trainer.loss": "gspo"}),
    (
        [*GRPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=777"],
        {"trainer.aggregation": "constant", "trainer.aggregation_length": 777},
    ),
    (
        [*GRPO, "algorithm.rollout_correction.bypass_mode=true"],
        {"trainer.proximal": "behaviour", "trainer.correction": None},
    ),
    (
        [*GRPO, f"{IS}=sequence", f"{IS}_threshold=3"],
        {"trainer.correction": "truncated_is", "trainer.correction_options": {"level": "sequence", "cap": 3.0}},
    ),
    (
        [*GRPO, f"{IS}=token", f"{IS}_threshold=0.5_5.0"],
        {"trainer.correction": "icepop", "trainer.correction_options": {"level": "token", "low": 0.5, "high": 5.0}},
    ),
    (
        [*GRPO, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.2", "trainer.total_training_steps=50"],
        {"trainer.warmup_steps": 10, "trainer.steps": 50},
    ),
    (
        [*GRPO, "algorithm.use_pf_ppo=true"],
        {"trainer.filter": "pf_ppo", "trainer.filter_options": {"mode": "pow", "power": 2.0}},
    ),
    (
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.002"],
        {"trainer.kl.in_loss": 0.002, "trainer.kl.in_reward": 0.0, "trainer.kl.estimator": "low_variance"},
    ),
    (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        {"trainer.kl.in_reward": 0.001, "trainer.kl.target": 0.1, "trainer.kl.estimator": "k1"},
    ),
    (
        [f"{ROLLOUT}.gpu_memory_utilization=0.8", f"+{ROLLOUT}.engine_kwargs.vllm.seed=3"],
        {
            "rollout.vllm_args": {
                **{"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "gpu_memory_utilization": 0.8},
                **{"enforce_eager": False, "max_num_batched_tokens": 8192, "seed": 3},
            }
        },
    ),
    (
        [f"{ROLLOUT}.name=sglang"],
        {"rollout.engine": "sglang", "rollout.sglang_args.tp_size": 2, "rollout.vllm_args": {}},
    ),
    (
        ["trainer.logger=[console,wandb]", "trainer.project_name=mine"],
        {"trainer.sinks": ("wandb",), "trainer.wandb.project": "mine"},
    ),
    ([], {"trainer.sinks": ("tensorboard",)}),
    ([f"{ACTOR}.optim.warmup_style=cosine"], {"trainer.lr_schedule": "linear"}),
    (
        ["model_engine=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
        {"trainer.engine": "megatron", "trainer.parallel.tensor": 4},
    ),
]


def setting(config: RunConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


@pytest.mark.parametrize(("overrides", "expected"), CONVERSIONS)
def test_settings_under_our_names(overrides: list[str], expected: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    from penstock.trainer import check_algorithm

    config = recipe(*overrides)
    assert {key: setting(config, key) for key in expected} == expected
    check_algorithm(config.trainer, config.group_size)


@pytest.mark.parametrize(
    ("threshold", "sync", "staleness"), [(0, 1, 0), (0, 4, 3), (0.5, 4, 5), (1, 1, 1), (0.1, 4, 4)]
)
def test_staleness_in_versions(threshold: float, sync: int, staleness: int) -> None:
    gpus = ("rollout.nnodes=1", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4")
    sizes = ("async_training.require_batches=2", f"{ACTOR}.ppo_mini_batch_size=32")
    words = (f"async_training.staleness_threshold={threshold}", f"async_training.trigger_parameter_sync_step={sync}")
    config = recipe(*GRPO, *words, *sizes, *gpus)
    assert config.max_staleness == staleness
    assert (config.groups_per_step, config.trainer.minibatches) == (64, 2)
    assert (config.trainer.ranks, config.rollout.servers) == (4, 2), "servers of two GPUs, verl's default"
    assert (config.trainer.correction == "truncated_is") == (staleness > 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer_mode=sync", "sampler.max_off_policy_threshold=4"], {"max_staleness": 0}),
        (["trainer_mode=separate_async", "sampler.max_off_policy_threshold=2"], {"max_staleness": 1}),
        (["trainer_mode=separate_async", "separate_async.parameter_sync_step=4"], {"max_staleness": 7}),
        (
            ["trainer_mode=separate_async", "separate_async.hybrid_rollout.enable_switch=true"],
            {"max_staleness": 7, "placement.lend": True, "placement.colocated": False},
        ),
        (
            ["trainer_mode=colocate_async", "separate_async.parameter_sync_step=4"],
            {"max_staleness": 7, "placement.colocated": True, "trainer.ranks": 4, "rollout.servers": 2},
        ),
    ],
)
def test_the_modes_of_v1(words: list[str], expected: dict[str, Any]) -> None:
    gpus = ("rollout.nnodes=1", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=4")
    config = recipe(*GRPO, *gpus, *(f"trainer.v1.{word}" for word in words))
    assert {key: setting(config, key) for key in expected} == expected


def test_tools_and_turns() -> None:
    words = (f"{MULTI}.enable=true", f"{MULTI}.max_assistant_turns=5", f"{MULTI}.tool_config_path=tools.yaml")
    tree = made(*words).recipe
    assert (tree["agent"]["loop"], tree["agent"]["max_turns"], tree["tools"]) == ("tool_agent", 5, "tools.yaml")
    assert made(*words, f"{MULTI}.max_user_turns=2").recipe["agent"]["max_turns"] == 3


# what has no counterpart ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("trainer.no_such_key=1", "not a setting of verl that is known here"),
        ("nonsense.key=1", "not a setting of verl that is known here"),
        ("algorithm.adv_estimator=grpo_passk", "grpo_passk is not here; grpo is used instead"),
        ("actor_rollout_ref.actor.ppo_epochs=4", "exactly once"),
        ("actor_rollout_ref.rollout.name=trtllm", "rollout.engine is one of vllm, sglang, hf"),
        ("data.train_files=[a.parquet, b.parquet]", "join them"),
        ("reward_model.enable=true", "penstock reward-server"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "cosine is not here"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "cosine is not here; linear is used instead"),
        ("trainer.logger=[console,swanlab]", "swanlab: write it as a function"),
        ("trainer.val_before_train=true", "penstock eval"),
        ("actor_rollout_ref.model.trust_remote_code=true", "code of their own"),
        ("actor_rollout_ref.actor.freeze_vision_tower=true", "the whole model learns"),
        ("distillation.enabled=true", "agent.teachers and trainer.distill"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float16", "bfloat16 is used instead"),
        ("reward.reward_manager.module.path=mine.py", "see reward.reward_manager.name"),
        ("reward.reward_manager.name=Mine", "write it as a compute_score"),
    ],
)
def test_each_key_is_told(override: str, why: str) -> None:
    flat = read_source(None, [*SHORT, override])
    migrated = made(override)
    migrated.check()
    assert_nothing_lost(flat, migrated)
    key = override.partition("=")[0]
    told = {one.key: one.why for one in migrated.account.unmapped}
    assert why in told[key]


def test_the_model_of_a_reward_server_is_named() -> None:
    model = "reward_model.model.path"
    assert {one.key for one in made("reward_model.enable=true", f"{model}=m").account.unmapped} == {
        "reward_model.enable",
        model,
    }
    assert made(f"{model}=m").account.unmapped == []


def test_a_file_smaller_than_a_step_is_noted(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "two.parquet")
    migrated = migrate(read_source(None, [f"data.train_files={tmp_path / 'two.parquet'}"]))
    assert [note for note in migrated.notes if note.startswith("a step has 1024 rows and the training file 2")]


def test_unknown_steps_are_told() -> None:
    optim = "actor_rollout_ref.actor.optim"
    flat = read_source(None, ["data.train_files=nowhere.parquet", f"{optim}.lr_warmup_steps_ratio=0.1"])
    migrated = migrate(flat)
    assert {one.key for one in migrated.account.unmapped} == {f"{optim}.lr_warmup_steps_ratio"}
    assert [note for note in migrated.notes if "40 steps" in note and "total_epochs=30 is verl's default" in note]
    assert "trainer" in migrated.recipe
    assert "steps" not in migrated.recipe["trainer"]


# the command ----------------------------------------------------------------------------------------------------------
SCRIPT = """
set -x
batch=128
steps=$((batch * 2 / 4))
export N=${N:-6}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$HOME/$DATA/train.parquet" \\
    data.val_files=${VAL:-$HOME/${SET:-gsm8k}/test.parquet} \\
    data.train_batch_size=${batch} \\
    actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    +actor_rollout_ref.actor.nonsense.of_mine=1 \\
    trainer.total_training_steps=$steps $@
"""


def test_a_script_is_read_and_the_recipe_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = tmp_path / "recipe.yaml"
    words = ["config", "from-verl", str(tmp_path / "run.sh"), "trainer.nnodes=1", "critic.ppo_epochs=2"]
    words += ["--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    config = load_config(out)
    assert (config.groups_per_step, config.group_size, config.trainer.steps, config.trainer.lr) == (128, 6, 64, 3e-6)
    # a variable that the script does not set is left to be seen
    assert config.data.train == f"{Path.home()}/$DATA/train.parquet"
    assert config.data.eval == f"{Path.home()}/gsm8k/test.parquet"
    assert "# not taken over: critic.ppo_epochs=2" in out.read_text()
    assert "critic.ppo_epochs=2" in done.stderr
    assert "3e-06" not in done.stderr, "what was taken over is listed by --all alone"
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0
    out.unlink()
    assert CliRunner().invoke(app, [*words, "--strict"]).exit_code == 1
    assert not out.exists()
    nothing = CliRunner().invoke(app, ["config", "from-verl"])
    assert (nothing.exit_code, "give verl's YAML file" in nothing.stderr) == (2, True)
    alone = CliRunner().invoke(app, ["config", "from-verl", *SHORT])
    assert yaml.safe_load(alone.stdout)["trainer"]["steps"] == 10


def test_a_variable_that_is_left_is_told() -> None:
    migrated = made("actor_rollout_ref.model.path=$1", "trainer.experiment_name=run-$(date)")
    assert migrated.recipe["name"] == "run"
    assert [note for note in migrated.notes if note.startswith("actor_rollout_ref.model.path=$1: its variable")]


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("groups_per_step: 3\n")
    done = CliRunner().invoke(app, ["config", "from-verl", str(tmp_path / "other.yaml")])
    assert (done.exit_code, "no setting of verl" in done.stderr) == (2, True)


def test_a_tilde_takes_a_setting_out() -> None:
    samples = "actor_rollout_ref.rollout.n"
    assert read_source(None, ["data.seed=1", f"{samples}=8", "~data"]).values == {samples: 8}
    with pytest.raises(BadSource, match="no such key is given"):
        read_source(None, [f"{samples}=8", "~data"])


def test_what_a_command_makes_is_told() -> None:
    migrated = made("custom_reward_function.path=$(find . -name r.py)")
    (lost,) = (one for one in migrated.account.unmapped if one.key == "custom_reward_function.path")
    assert "which is not run: give custom_reward_function.path=VALUE" in lost.why
    assert "$(" not in migrated.yaml().partition("\nmodel:")[2]


def test_a_second_estimator_of_kl_is_told() -> None:
    actor = "actor_rollout_ref.actor"
    words = (f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_type=low_var_kl", "algorithm.use_kl_in_reward=true")
    migrated = made(*words, "algorithm.kl_penalty=kl")
    assert migrated.recipe["trainer"]["kl"]["estimator"] == "low_variance"
    assert "algorithm.kl_penalty" in {one.key for one in migrated.account.unmapped}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "found list"),
        ("data: {train_batch_size: many}", "cannot be read"),
        ("data: {train_batch_size: '${SIZE}'}", r"give data.train_batch_size=NUMBER"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "verl.yaml").write_text(text)
    done = CliRunner().invoke(app, ["config", "from-verl", str(tmp_path / "verl.yaml")])
    assert (done.exit_code, "Traceback" in done.output) == (2, False)
    assert message in done.output


def test_references_are_followed(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(
        "data: {train_batch_size: 32, gen: '${data.train_batch_size}'}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: '${oc.select:data.gen,8}'}}\n"
    )
    flat = read_source(tmp_path / "verl.yaml", ()).values
    assert flat["actor_rollout_ref.actor.ppo_mini_batch_size"] == 32
    with pytest.raises(BadSource, match=r"write it as a\.b=value"):
        read_source(None, ["novalue"])
