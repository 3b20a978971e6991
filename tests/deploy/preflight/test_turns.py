"""What a colocated run is refused for, and the sums that it is shown; no process is started."""

from __future__ import annotations

import pytest
from tests.deploy.preflight.preflight_support import RECIPE, assert_refused, failed

from penstock.deploy import ConfigError, RunConfig, load_config, run_recipe
from penstock.deploy.preflight.memory_checks import Gpus, check_device
from penstock.deploy.preflight.model_shape import ModelShape, shape_from_config
from penstock.deploy.preflight.turns import check_turns, refuse_elsewhere, turn_bytes

SHARED, BUDGET = "placement.colocated=true", "placement.memory_budget_bytes"


def configured(*overrides: str) -> RunConfig:
    return load_config(RECIPE, [SHARED, *overrides])


LENT = "placement.lend=true"


def test_the_recipe_with_one_key_changed_passes() -> None:
    assert failed(check_turns, SHARED) == {}
    assert list(check_turns(load_config(RECIPE))) == []


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([SHARED, "rollout.weight_transport=broadcast"], "rollout.weight_transport.*; .*rollout.weight_transport=shm"),
        ([SHARED, "rollout.weight_transport=nccl"], "rollout.weight_transport=nccl.*; .*rollout.weight_transport=shm"),
        ([SHARED, "rollout.engine=served"], "rollout.engine.*; .*rollout.engine=hf"),
        ([SHARED, "rollout.servers=0"], "rollout.servers.*; .*rollout.servers"),
        ([SHARED, "trainer.engine=megatron"], "trainer.engine.*; .*trainer.engine=fsdp"),
        ([SHARED, "rollout.engine=vllm", f"{BUDGET}=1000000000"], f"{BUDGET}.*; .*rollout.vllm_args"),
        ([SHARED, f"{BUDGET}=1000000"], f"the budget is 976.6 KiB.*; .*{BUDGET}="),
        ([LENT, SHARED], "placement.colocated.*; .*one of the two"),
        ([LENT, "rollout.servers=0"], "rollout.servers=0.*; .*placement.colocated=true"),
        ([LENT, "rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 2}"], "2 GPUs.*; .*trainer.ranks"),
        ([LENT, "rollout.weight_transport=broadcast"], "rollout.weight_transport.*; .*rollout.weight_transport=shm"),
        ([LENT, "trainer.engine=megatron"], "trainer.engine.*; .*placement.lend=false"),
    ],
)
def test_what_cannot_work_is_named_with_its_fix(words: list[str], fix: str) -> None:
    assert_refused(check_turns, words, fix)


def test_the_sums_of_a_run_that_lends_are_of_the_lent_server() -> None:
    lent = turn_bytes(load_config(RECIPE, [LENT, "rollout.servers=3"]))
    assert lent == turn_bytes(configured("rollout.servers=1"))
    with pytest.raises(ConfigError, match=r"placement\.lend.*Slurm"):
        refuse_elsewhere(load_config(RECIPE, [LENT]), "Slurm")


def test_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "2")
    assert_refused(check_turns, [SHARED], "2 machines")
    with pytest.raises(ConfigError, match="Slurm"):
        refuse_elsewhere(configured(), "Slurm")
    refuse_elsewhere(load_config(RECIPE), "Slurm")


def test_the_suggested_budget_is_enough() -> None:
    (small,) = failed(check_turns, SHARED, f"{BUDGET}=1000000").values()
    assert failed(check_turns, SHARED, small.fix.split()[1]) == {}


def test_dry_run_prints_both_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_recipe(RECIPE, [SHARED], resume=False, dry_run=True) == 0
    printed = capsys.readouterr().err
    for words in ("in turns on the same devices", "engines", "trainer", "in their turn"):
        assert words in printed


def test_the_sums_are_of_weights_cache_and_states() -> None:
    sides = turn_bytes(configured())
    twice = turn_bytes(configured("rollout.servers=2", "trainer.ranks=2"))
    assert sides is not None
    assert twice is not None
    assert twice["engines"] == 2 * sides["engines"]
    assert twice["trainer"] == pytest.approx(sides["trainer"], rel=0.01)


@pytest.mark.torch
@pytest.mark.parametrize("offload", ["false", "optimizer"])
def test_a_trainer_claims_what_was_counted(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under offload one part of the moments at a time; a parameter's are in one part."""
    host_states = pytest.importorskip("penstock.trainer.engines.fsdp.host_states")
    from penstock.trainer import Ranks
    from penstock.trainer.engines.fsdp import FSDPEngine

    monkeypatch.setattr(host_states, "PART_BYTES", 1 << 20)
    monkeypatch.setattr("penstock.deploy.preflight.rank_memory.MOMENTS_PART", 1 << 20)
    config = configured(f"trainer.offload={offload}")
    sides, ranks = turn_bytes(config), Ranks.open(timeout_s=30)
    try:
        engine = FSDPEngine(config.model, config.trainer, ranks)
    finally:
        ranks.close()
    assert sides is not None
    largest = max(2 * one.nbytes for one in engine.policy.parameters())
    assert sides["trainer"] == pytest.approx(engine.turn_bytes, abs=largest + 4096)


# one GPU ------------------------------------------------------------------------------------------------------------
GPU = Gpus(1, 80 << 30)
SMALL = {
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 36},
    **{"intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
}
"""About 3 billion parameters: 12 GB of weights in float32, 49 GB with gradients and moments."""


@pytest.fixture
def shape() -> ModelShape:
    found = shape_from_config(SMALL)
    assert found is not None
    return found


def on_vllm(*words: str) -> RunConfig:
    settings = ("rollout.engine=vllm", "rollout.dtype=bfloat16", "trainer.dtype=bfloat16", "trainer.recompute=true")
    return load_config(RECIPE, [*settings, *words])


def test_in_turns_a_device_holds_what_it_cannot_hold_at_once(shape: ModelShape) -> None:
    together = check_device("gpu memory", on_vllm(), shape, GPU)
    assert not together.ok
    assert "engines" in together.found
    in_turns = check_device("gpu memory", on_vllm(SHARED), shape, GPU)
    assert in_turns.ok, in_turns.found
    assert "asleep" in in_turns.found


def test_a_lent_server_sleeps_where_a_second_one_would_not_fit(shape: ModelShape) -> None:
    two = Gpus(2, GPU.bytes)
    assert not check_device("gpu memory", on_vllm("rollout.servers=2"), shape, two).ok
    lent = check_device("gpu memory", on_vllm(LENT), shape, two)
    assert lent.ok, lent.found
    assert "asleep" in lent.found


def test_in_turns_each_side_must_fit_by_itself(shape: ModelShape) -> None:
    found = check_device("gpu memory", on_vllm(SHARED), shape, Gpus(1, 40 << 30))
    assert not found.ok
    assert "trainer.offload=optimizer" in found.fix
