"""What settings change in the sums of memory; `test_memory_measured` has their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.preflight.preflight_support import MODEL, RECIPE, write_huge_model
from tests.tiny_model import save_tiny_model

from penstock.deploy import load_config
from penstock.deploy.preflight.memory import copied_bytes, host_parts, received_bytes
from penstock.deploy.preflight.model import read_config, read_weights
from penstock.deploy.preflight.model_shape import ModelShape, shape_of
from penstock.deploy.preflight.rank_memory import trainer_bytes
from penstock.trainer import TrainerConfig

GIGA = 10**9
BIG = ModelShape(8 * GIGA, layers=32, hidden=4096, query=4096, key_value=1024, mlp=14336, lora=2_000_000)
BROADCAST = "rollout.weight_transport=broadcast"


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


def test_memory_counts_the_experts_of_a_token(tmp_path: Path) -> None:
    weights = read_weights(write_huge_model(tmp_path / "model", 4 * GIGA))
    assert weights is not None
    shape = shape_of({**read_config(MODEL), "moe_intermediate_size": 96, "num_experts_per_tok": 8}, weights)
    assert shape is not None
    assert shape.mlp == 8 * 96
    assert shape_of({"model_type": "something new"}, weights) is None


def rank(shape: ModelShape = BIG, *, critic: bool = False, tokens: int = 1, **settings: Any) -> dict[str, float]:
    return trainer_bytes(shape, TrainerConfig.model_validate({"dtype": "float32", **settings}), tokens, critic=critic)


@pytest.mark.parametrize(
    ("settings", "shards"),
    [({"ranks": 8}, 8), ({"ranks": 8, "parallel": {"replicate": 4}}, 2)],
    ids=["sharded", "replicated"],
)
def test_a_rank_holds_its_share_of_the_states(settings: dict[str, Any], shards: int) -> None:
    alone, one_of_them = rank(), rank(**settings)
    for part in ("weights", "gradients", "moments"):
        assert one_of_them[part] == alone[part] / shards


def test_activations_of_a_longer_row_and_with_less_kept() -> None:
    parts = {
        name: rank(dtype="bfloat16", micro_batch_tokens=8192, **more)["activations"]
        for name, more in (
            ("all", {}),
            ("selective", {"recompute": "selective"}),
            ("recomputed", {"recompute": True}),
            ("offloaded", {"recompute": True, "activation_offload": True}),
        )
    }
    assert parts["all"] > parts["selective"] > parts["recomputed"] > parts["offloaded"]
    assert rank(dtype="bfloat16", micro_batch_tokens=8192, tokens=16384)["activations"] == 2 * parts["all"]
    group = rank(ranks=4, dtype="bfloat16", micro_batch_tokens=8192, parallel={"tensor": 4})["activations"]
    assert parts["all"] / 4 < group < parts["all"], "the residual stream is not shared out"


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_matrices_of_experts_are_counted_as_they_lie_in_memory(kind: str, tmp_path: Path) -> None:
    """The files of one have a tensor for each expert's gate and up, those of the other stacks, also of biases."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = Path(save_tiny_model(tmp_path, kind, **sizes))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stacks = [one.shape for one in model.parameters() if one.dim() == 3]
    weights = read_weights(folder)
    assert weights is not None
    shape = shape_of(read_config(folder), weights)
    assert shape is not None
    assert shape.experts_lora == sum(count * (rows + columns) for count, rows, columns in stacks) > 0
    some, whole = (replace(shape, lora=100, experts_lora=count) for count in (0, 1000))
    both = TrainerConfig(dtype="float32", lora={"rank": 8, "targets": ("all-linear", "experts")})
    first, second = (trainer_bytes(one, both, 64, critic=False)["gradients"] for one in (some, whole))
    assert second == 11 * first


def test_lora_learns_its_own_matrices_alone_and_a_critic_and_a_reference_add_theirs() -> None:
    lora, whole = rank(lora={"rank": 16}), rank()
    assert lora["gradients"] / whole["gradients"] == 16 * BIG.lora / BIG.parameters
    assert rank(lora={"rank": 16}, kl={"in_loss": 0.1})["weights"] == lora["weights"], "the base is the reference"
    assert rank(lora={"rank": 16}, critic=True)["gradients"] == lora["gradients"] + whole["gradients"]
    low = {"dtype": "bfloat16", "kl": {"in_loss": 0.1}}
    assert rank(**low)["weights"] == 1.5 * whole["weights"], "a reference as the arithmetic has it"
    exact = {"dtype": "bfloat16", "kl": {"in_loss": 0.1, "reference_dtype": "float32"}}
    assert rank(**exact)["weights"] == 2 * whole["weights"]


def test_one_shard_computes_with_a_second_copy() -> None:
    of_last_layer = 1 - 1 / BIG.layers  # a layer's copy is given back after its backward
    assert rank()["gathered layers"] == rank()["weights"]
    assert rank(dtype="bfloat16")["gathered layers"] == of_last_layer * rank()["weights"] / 2
    sharded = rank(dtype="bfloat16", ranks=8)["gathered layers"]
    assert rank(replace(BIG, outer=GIGA), dtype="bfloat16", ranks=8)["gathered layers"] > sharded


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ([], 0),
        ([BROADCAST], 1),
        (["trainer.ranks=8"], 1),
        (["trainer.ranks=8", "rollout.weights_full_every=4"], 1 + 1 / 16),  # a bit for each value more
        (["rollout.weights_full_every=4"], 1 + 1 / 16),
        (["trainer.ranks=8", "rollout.weights_full_every=4", BROADCAST], 1),
        (["trainer.ranks=8", "trainer.lora.rank=8"], 0),
        (["trainer.ranks=8", "trainer.parallel.tensor=2"], 2),
        (["trainer.ranks=8", "trainer.engine=megatron"], 2),
    ],
)
def test_ranks_keep_their_shares_of_what_they_publish(words: list[str], copies: float) -> None:
    config = load_config(RECIPE, ["rollout.dtype=bfloat16", *words])
    assert copied_bytes(BIG, config) == host_parts(config, BIG)["copied weights"] == copies * 16 * GIGA


def test_a_broadcast_is_staged_in_a_whole_copy_or_in_buckets() -> None:
    low, in_place = "rollout.dtype=bfloat16", "rollout.broadcast_receive=in_place"
    assert received_bytes(BIG, load_config(RECIPE, [low])) == 0
    assert received_bytes(BIG, load_config(RECIPE, [low, BROADCAST])) == 16 * GIGA
    buckets = received_bytes(BIG, load_config(RECIPE, [low, BROADCAST, in_place]))
    assert 0 < buckets < GIGA
    vllm = [low, BROADCAST, in_place, "rollout.engine=vllm", "rollout.vllm_args={tensor_parallel_size: 2}"]
    of_layer = 2 * BIG.parameters / BIG.layers
    assert received_bytes(BIG, load_config(RECIPE, vllm)) == 2 * (buckets + of_layer), "on each worker"


def test_each_server_offloads_keys_and_values_to_host_memory() -> None:
    settings = ["rollout.engine=vllm", "rollout.servers=2"]
    assert host_parts(load_config(RECIPE, settings), BIG)["offloaded KV"] == 0
    assert host_parts(load_config(RECIPE, [*settings, "rollout.kv_offload_gb=8"]), BIG)["offloaded KV"] == 16 << 30


def test_states_on_the_host_are_pinned_and_a_save_copies_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.deploy.run.plan.DRIVER", tmp_path)
    plain, offloaded, moments = (
        host_parts(load_config(RECIPE, words), BIG)
        for words in ([], ["trainer.offload=true"], ["trainer.offload=optimizer"])
    )
    assert plain["trainer"] == 0
    assert moments["trainer"] == 8 * BIG.parameters
    assert offloaded["trainer"] > 16 * BIG.parameters, "pinned allocations are rounded up"
    assert plain["checkpoint"] == 12 * BIG.parameters
    assert moments["checkpoint"] == 4 * BIG.parameters
    assert offloaded["checkpoint"] == 0, "it is written from the states themselves"
    assert host_parts(load_config(RECIPE, ["trainer.lora.rank=8"]), BIG)["checkpoint"] < BIG.parameters
    low, usual, exact = (
        host_parts(load_config(RECIPE, ["trainer.activation_offload=true", *words]), BIG)["offloaded activations"]
        for words in (["trainer.dtype=bfloat16"], [], ["trainer.dtype=float32"])
    )
    assert low == usual < exact, "the default on GPUs is bfloat16"
    in_turns = host_parts(load_config(RECIPE, ["placement.colocated=true"]), BIG)
    assert in_turns["trainer"] == 12 * BIG.parameters, "no gradients outside of a turn"
