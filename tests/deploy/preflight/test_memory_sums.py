"""The memory arithmetic, against sums done by hand and against what is in the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.deploy.preflight.planting import MODEL, RECIPE, write_huge_model

from penstock.deploy import load_config
from penstock.deploy.preflight.memory import (
    ModelShape,
    copied_bytes,
    host_parts,
    in_flight_bytes,
    published_bytes,
    received_bytes,
    server_bytes,
    shape_of,
    trainer_bytes,
)
from penstock.deploy.preflight.model import read_config, read_weights
from penstock.trainer import TrainerConfig

GIGA = 10**9
BIG = ModelShape(8 * GIGA, layers=32, hidden=4096, query=4096, key_value=1024, mlp=14336, lora=2_000_000)
LAYER = 6 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336
"""What a layer of BIG keeps for its backward, per token, in elements."""


def test_a_model_is_counted_without_being_loaded() -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    weights = read_weights(MODEL)
    assert weights is not None
    assert weights.parameters == sum(array.size for array in numpy.load_file(MODEL / "model.safetensors").values())
    shape = shape_of(read_config(MODEL), weights)
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.query, shape.key_value, shape.mlp) == (3, 192, 256, 128, 384)
    per_layer = (192 + 256) * 2 + (192 + 128) * 2 + (192 + 384) * 3  # q and o, k and v, gate, up and down
    assert shape.lora == 3 * per_layer


def test_a_rank_of_eight_holds_an_eighth_of_the_states() -> None:
    config = TrainerConfig(ranks=8, dtype="bfloat16", micro_batch_tokens=8192)
    found = trainer_bytes(BIG, config, 4096, critic=False)
    assert found["weights"] == found["gradients"] == found["moments"] / 2 == 4 * GIGA
    assert found["gathered layers"] == 2 * 2 * 8 * GIGA / 32
    assert found["activations"] == 2 * 8192 * 32 * LAYER
    assert trainer_bytes(BIG, config, 16384, critic=False)["activations"] == 2 * 16384 * 32 * LAYER, "one long row"


def test_a_set_of_replicated_shards_holds_all_states() -> None:
    config = TrainerConfig.model_validate({"ranks": 8, "dtype": "bfloat16", "parallel": {"replicate": 4}})
    found = trainer_bytes(BIG, config, 1, critic=False)
    assert found["weights"] == found["gradients"] == found["moments"] / 2 == 4 * 8 * GIGA / 2
    alone = TrainerConfig.model_validate({"ranks": 8, "dtype": "bfloat16", "parallel": {"replicate": 8}})
    assert trainer_bytes(BIG, alone, 1, critic=False)["gathered layers"] == 2 * 8 * GIGA, "one shard is not given back"


def test_what_is_recomputed_is_not_kept() -> None:
    config = TrainerConfig(dtype="bfloat16", micro_batch_tokens=8192, recompute=True)
    assert trainer_bytes(BIG, config, 1, critic=False)["activations"] == 2 * 8192 * (32 * 4096 + LAYER)


def test_of_a_selection_the_cheap_half_is_not_kept() -> None:
    """Kept: input, queries, values, gate, attention's output and the MLP's."""
    config = TrainerConfig(dtype="bfloat16", micro_batch_tokens=8192, recompute="selective")
    kept = 2 * 4096 + 2 * 4096 + 1024 + 14336
    found = trainer_bytes(BIG, config, 1, critic=False)["activations"]
    assert found == 2 * 8192 * (32 * kept + LAYER)
    whole, none = (
        trainer_bytes(BIG, config.model_copy(update={"recompute": one}), 1, critic=False)["activations"]
        for one in (True, False)
    )
    assert whole < found < none


def test_of_offloaded_activations_two_layers_are_on_the_device() -> None:
    settings = [*("trainer.dtype=bfloat16", "trainer.micro_batch_tokens=8192"), "rollout.max_model_len=4096"]
    assert host_parts(load_config(RECIPE, settings), BIG)["offloaded activations"] == 0
    for recompute, of_layer, once in ((False, LAYER, 0), (True, 4096, LAYER)):
        given = [*settings, "trainer.activation_offload=true", f"trainer.recompute={recompute}", "trainer.ranks=2"]
        config = load_config(RECIPE, given)
        found = trainer_bytes(BIG, config.trainer, 4096, critic=False)["activations"]
        assert found == 2 * 8192 * (2 * of_layer + once)
        assert host_parts(config, BIG)["offloaded activations"] == pytest.approx(2 * 2 * 8192 * 31 * of_layer)


def test_lora_learns_its_own_matrices_alone_and_a_critic_doubles() -> None:
    lora = TrainerConfig.model_validate({"lora": {"rank": 16}})
    found = trainer_bytes(BIG, lora, 1, critic=False)
    assert found["gradients"] == 4 * 16 * 2_000_000
    assert found["weights"] == 4 * 8 * GIGA
    plain = trainer_bytes(BIG, TrainerConfig(), 1, critic=False)
    both = trainer_bytes(BIG, TrainerConfig(), 1, critic=True)
    assert [both[name] / plain[name] for name in ("weights", "gradients", "moments")] == [2, 2, 2]
    reference = TrainerConfig.model_validate({"kl": {"in_loss": 0.1}})
    assert trainer_bytes(BIG, reference, 1, critic=False)["weights"] == 2 * plain["weights"]


def test_reference_and_critic_take_what_their_dtypes_take() -> None:
    low = TrainerConfig.model_validate({"dtype": "bfloat16", "kl": {"in_loss": 0.1}, "ranks": 8})
    assert trainer_bytes(BIG, low, 1, critic=False)["weights"] == (4 + 2) * GIGA, "as the arithmetic has it"
    exact = TrainerConfig.model_validate({**low.model_dump(), "kl": {"in_loss": 0.1, "reference_dtype": "float32"}})
    assert trainer_bytes(BIG, exact, 1, critic=False)["weights"] == (4 + 4) * GIGA
    asked = TrainerConfig.model_validate({"ranks": 8, "critic": {"dtype": "bfloat16"}})
    found = trainer_bytes(BIG, asked, 1, critic=True)
    assert (found["weights"], found["gradients"], found["moments"]) == (6 * GIGA, 6 * GIGA, 12 * GIGA)
    lora = TrainerConfig.model_validate({"ranks": 8, "lora": {"rank": 16}})
    beside = trainer_bytes(BIG, lora, 1, critic=True)
    assert beside["gradients"] == 4 * GIGA + 4 * 16 * 2_000_000 / 8, "the critic learns whole"


def test_one_shard_computes_with_a_second_copy_in_low_precision() -> None:
    low = TrainerConfig(dtype="bfloat16")
    assert trainer_bytes(BIG, low, 1, critic=False)["gathered layers"] == 2 * 8 * GIGA
    assert trainer_bytes(BIG, TrainerConfig(), 1, critic=False)["gathered layers"] == 0
    assert trainer_bytes(BIG, TrainerConfig(offload=True), 1, critic=False)["gathered layers"] == 4 * 8 * GIGA
    sharded = TrainerConfig(ranks=8, dtype="bfloat16")
    found = trainer_bytes(replace(BIG, outer=GIGA), sharded, 1, critic=False)
    assert found["gathered layers"] == 2 * (2 * 7 * GIGA / 32 + GIGA), "embedding and head beside two layers"


def test_the_base_under_lora_is_its_own_reference_and_keeps_its_dtype() -> None:
    lora = TrainerConfig.model_validate({"dtype": "bfloat16", "lora": {"rank": 16}, "kl": {"in_loss": 0.1}})
    assert trainer_bytes(BIG, lora, 1, critic=False)["weights"] == 4 * 8 * GIGA
    low = trainer_bytes(replace(BIG, dtype="bfloat16"), lora, 1, critic=False)
    assert (low["weights"], low["gathered layers"]) == (2 * 8 * GIGA, 0)


def test_a_tensor_group_shares_out_products_and_not_the_residual_stream() -> None:
    config = TrainerConfig.model_validate({"ranks": 4, "recompute": True, "parallel": {"tensor": 4}})
    found = trainer_bytes(BIG, config, 4096, critic=False)["activations"]
    assert found == 4 * 4096 * (32 * 4096 + 6 * 4096 + (LAYER - 6 * 4096) / 4)


def test_servers_the_queue_and_shared_memory() -> None:
    config = load_config(RECIPE, ["rollout.dtype=bfloat16"])
    assert server_bytes(BIG, config, 1000) == {"weights": 16 * GIGA, "KV cache": 2 * 32 * 1024 * 2 * 1000}
    assert published_bytes(BIG, config) == 3 * 16 * GIGA
    assert in_flight_bytes(config) == 3 * 8 * 8 * 120 * 9


def test_ranks_keep_their_shares_of_what_they_publish() -> None:
    low, several = "rollout.dtype=bfloat16", "trainer.ranks=8"
    assert copied_bytes(BIG, load_config(RECIPE, [low])) == 0, "a lone rank writes its copy"
    assert copied_bytes(BIG, load_config(RECIPE, [low, "rollout.weight_transport=broadcast"])) == 16 * GIGA
    assert copied_bytes(BIG, load_config(RECIPE, [low, several])) == 16 * GIGA
    deltas = "rollout.weights_full_every=4"
    for ranks in ([several], []):
        assert copied_bytes(BIG, load_config(RECIPE, [low, *ranks, deltas])) == 17 * GIGA, "a bit for each value more"
    full = [low, several, deltas, "rollout.weight_transport=broadcast"]
    assert copied_bytes(BIG, load_config(RECIPE, full)) == 16 * GIGA
    assert copied_bytes(BIG, load_config(RECIPE, [low, several, "trainer.lora.rank=8"])) == 0
    for spread in ("trainer.parallel.tensor=2", "trainer.engine=megatron"):
        config = load_config(RECIPE, [low, several, spread])
        assert copied_bytes(BIG, config) == host_parts(config, BIG)["copied weights"] == 2 * 16 * GIGA


def test_a_broadcast_is_staged_in_a_whole_copy_or_in_buckets() -> None:
    broadcast = ["rollout.dtype=bfloat16", "rollout.weight_transport=broadcast"]
    in_place = [*broadcast, "rollout.broadcast_receive=in_place"]
    assert received_bytes(BIG, load_config(RECIPE, ["rollout.dtype=bfloat16"])) == 0
    assert received_bytes(BIG, load_config(RECIPE, broadcast)) == 16 * GIGA
    buckets = 2 * (32 << 20)
    assert received_bytes(BIG, load_config(RECIPE, in_place)) == buckets
    vllm = load_config(RECIPE, [*in_place, "rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 2}"])
    assert received_bytes(BIG, vllm) == 2 * (buckets + 2 * 8 * GIGA / 32), "a layer's tensors, on each worker"
    assert received_bytes(replace(BIG, outer=GIGA), vllm) == 2 * (buckets + 2 * GIGA)


def test_offloaded_keys_and_values_are_host_memory_of_each_server() -> None:
    settings = ["rollout.engine=vllm", "rollout.servers=2"]
    assert host_parts(load_config(RECIPE, settings), BIG)["offloaded KV"] == 0
    assert host_parts(load_config(RECIPE, [*settings, "rollout.kv_offload_gb=8"]), BIG)["offloaded KV"] == 16 << 30


def test_each_further_sidecar_process_is_a_process_without_torch() -> None:
    settings = ["rollout.engine=vllm", "rollout.servers=2"]
    one, three = (
        host_parts(load_config(RECIPE, [*settings, f"rollout.sidecar_processes={processes}"]), BIG)["processes"]
        for processes in (1, 3)
    )
    assert three - one == 2 * 2 * (100 << 20)


def test_memory_counts_the_experts_of_a_token(tmp_path: Path) -> None:
    weights = read_weights(write_huge_model(tmp_path / "model", 4 * GIGA))
    assert weights is not None
    assert weights.parameters == 4 * GIGA // 4096 * 4096
    told = {**read_config(MODEL), "moe_intermediate_size": 96, "num_experts_per_tok": 8}
    shape = shape_of(told, weights)
    assert shape is not None
    assert shape.mlp == 8 * 96
    assert replace(shape, mlp=0).hidden == 192
    assert shape_of({"model_type": "something new"}, weights) is None
