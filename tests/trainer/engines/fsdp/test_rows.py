"""How rows go through a model: the choice, each layout's exactness, and what is refused.

That each family is exact, packed or not, is in tests/docs/test_models.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers
from scripts.model_table.families import FAMILIES, Family
from scripts.model_table.trying import SAME, gaps, tiny_rows
from tests.tiny_model import SHAPE
from trainer_support import newest

from penstock.trainer import BadJob, Ranks, TrainerConfig, pack_rows
from penstock.trainer.engines.fsdp import FSDPEngine, load_policy
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel
from penstock.trainer.engines.fsdp.trial import Trial, try_copy
from penstock.trainer.packing import RowLayout, join_rows, split_by_length
from penstock.trainer.ranks.layout import RankLayout
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import DataCursor

pytestmark = pytest.mark.torch
INSIDE = "penstock.trainer.engines.fsdp"

BY_KIND: Mapping[str, Family] = {family.kind: family for family in FAMILIES}
WITH_STATE = ("Qwen3Next", "NemotronH", "Lfm2")


def test_rows_of_about_one_length_come_together() -> None:
    lengths = [5, 40, 7, 38, 90, 6, 41]
    packs = split_by_length(lengths, 128)
    assert [[lengths[index] for index in pack] for pack in packs] == [[90], [41, 40, 38], [7, 6, 5]]
    assert all(len(pack) * max(lengths[index] for index in pack) <= 128 for pack in packs)
    assert [len(pack) for pack in split_by_length(lengths, 0)] == [1] * 7


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_state_that_leaks_is_found_and_its_rows_are_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a family that is not in the table: transformers' own loops take a pack for one row."""
    monkeypatch.setattr(f"{INSIDE}.mixers.MIXERS", {})
    policy = load_policy(BY_KIND[kind].save(tmp_path), 1.0)
    assert policy.rows.layout is RowLayout.PADDED
    # Newer transformers refuse by themselves what they cannot keep apart.
    assert policy.rows.unpacked_because in {
        "its packed rows differ from the same rows alone",
        "`chunk_gated_delta_rule` can't keep packed sequences apart without `flash-linear-attention`",
    }
    assert max(gaps(policy, str(tmp_path))) <= SAME


@pytest.mark.parametrize(
    ("kind", "context"), [("Zamba2", 256), ("Mpt", 256), ("RecurrentGemma", 1 << 20), ("Bloom", 1 << 20)]
)
def test_what_passes_the_trial_trains(tmp_path: Path, ranks: Ranks, kind: str, context: int) -> None:
    """Zamba 2 shares parameters between layers; the others name no longest position, or by another name."""
    model = BY_KIND[kind].save(tmp_path)
    assert not try_copy(model, ranks).skipped
    engine = FSDPEngine(model, TrainerConfig(dtype="float32"), ranks)
    assert engine.limits.context == context
    assert max(gaps(engine.policy, model)) <= SAME


def test_a_model_that_cannot_be_published_is_refused_before_the_run(tmp_path: Path, ranks: Ranks) -> None:
    model = Family("HRM-Text", "HrmText").save(tmp_path)
    for start in (partial(try_copy, model), partial(FSDPEngine, model, TrainerConfig())):
        with pytest.raises(BadJob, match=rf"^{model}: tensor \S+ of its files is several parameters of the model: "):
            start(ranks)


def test_an_engine_that_fails_on_a_small_copy_refuses_the_model(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As zamba2 would if each layer's parameters were sharded by themselves."""
    monkeypatch.setattr(f"{INSIDE}.sharded._without_shared", lambda blocks, _: blocks)
    with pytest.raises(BadJob, match=r"^Zamba2ForCausalLM cannot be trained by trainer\.engine fsdp: .*shared"):
        try_copy(BY_KIND["Zamba2"].save(tmp_path), ranks)


def test_a_head_with_parameters_of_its_own_is_called_whole(tmp_path: Path) -> None:
    """Dory learns the scale of its logits, which is 1 in a new model."""
    policy = load_policy(Family("Dory", "Dory").save(tmp_path), 1.0)
    assert policy.head is None
    assert max(gaps(policy, str(tmp_path))) <= SAME


REMBERT = {"input_embedding_size": 16, "output_embedding_size": 48}


def test_a_layer_before_the_head_is_not_left_out(tmp_path: Path, ranks: Ranks) -> None:
    model = Family("RemBERT", "RemBert", {**REMBERT, "is_decoder": True}).save(tmp_path)
    assert not try_copy(model, ranks).skipped
    policy = load_policy(model, 1.0)
    assert policy.head is None
    assert max(gaps(policy, model)) <= SAME


@pytest.mark.parametrize(("kind", "changes"), [("RemBert", REMBERT), ("Roberta", {"pad_token_id": 63})])
def test_a_model_that_reads_later_tokens_is_refused(
    tmp_path: Path, ranks: Ranks, kind: str, changes: Mapping[str, Any]
) -> None:
    model = Family(kind, kind, changes).save(tmp_path)
    with pytest.raises(BadJob, match=r"its logits depend on later tokens.*is_decoder"):
        FSDPEngine(model, TrainerConfig(), ranks)


@pytest.mark.parametrize("window", [16, 4096])
def test_what_a_model_decides_from_the_whole_call_is_decided_for_each_row(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A model that computes otherwise once a row of its call is longer than a length of its settings: also where that
    is longer than the rows that are tried."""
    rotary = transformers.models.mistral.modeling_mistral.MistralRotaryEmbedding
    original = rotary.forward

    def forward(self: Any, x: Any, position_ids: Any) -> Any:
        cos, sin = original(self, x, position_ids)
        return (cos, sin) if position_ids.max() < self.config.sliding_window else (cos * 1.2, sin * 1.2)

    monkeypatch.setattr(rotary, "forward", forward)
    model = replace(BY_KIND["Mistral"], changes={"sliding_window": window}).save(tmp_path)
    policy, engine = load_policy(model, 1.0), FSDPEngine(model, TrainerConfig(), ranks)
    assert policy.rows.layout is engine.row_layout is RowLayout.ALONE
    assert "some of them longer than its sliding_window" in policy.rows.unpacked_because
    assert max(gaps(policy, model)) <= SAME


@pytest.mark.parametrize("window", [16, 65])
def test_rows_of_doge_beyond_its_window_are_exact(tmp_path: Path, ranks: Ranks, window: int) -> None:
    """Beyond `keep_window_size` it keeps keys by the longest row of the call; 65 is longer than the rows that are
    tried on the model itself, and shorter than one that is compared."""
    model = replace(BY_KIND["Doge"], changes={"keep_window_size": window}).save(tmp_path)
    engine = FSDPEngine(model, TrainerConfig(dtype="float32"), ranks)
    assert engine.row_layout is RowLayout.ALONE
    assert max(len(row.ids) for row in tiny_rows()) > window
    assert max(gaps(engine.policy, model)) <= SAME


@pytest.mark.parametrize("global_head_dim", [8, 16])
def test_gemma_4_trains_with_heads_of_several_sizes(tmp_path: Path, ranks: Ranks, global_head_dim: int) -> None:
    """Layers without a window have heads of their own size; the engine starts, its rows are exact, its weights learn.
    Attention is counted by the size of each layer's heads."""
    family = replace(BY_KIND["Gemma4"], changes={**BY_KIND["Gemma4"].changes, "global_head_dim": global_head_dim})
    engine = FSDPEngine(family.save(tmp_path), TrainerConfig(lr=1e-3, dtype="float32"), ranks)
    assert max(gaps(engine.policy, str(tmp_path))) <= SAME
    assert engine.flops is not None
    assert engine.flops.attention == 4 * (8 + global_head_dim)
    pack = join_rows(tiny_rows())
    losses = [engine.update([pack], lambda _, outputs: -outputs.logprobs.sum(), 90.0, step).loss for step in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("kind", ["Qwen3Next", "GptOss"])
def test_rows_one_by_one_are_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    original = import_module(f"{INSIDE}.row_choice").TrialRows.by

    def by(probe: Any, plan: Any) -> Any:
        difference = original(probe, plan)
        return difference if plan.layout is RowLayout.ALONE else difference + 1

    monkeypatch.setattr(f"{INSIDE}.row_choice.TrialRows.by", by)
    policy = load_policy(BY_KIND[kind].save(tmp_path), 1.0)
    assert policy.rows.layout is RowLayout.ALONE
    assert "rows one by one (" in str(policy.rows)
    assert max(gaps(policy, str(tmp_path))) <= SAME


@pytest.mark.parametrize("kind", ["NemotronH", "GptOss", "Llama4"])
def test_packs_of_any_size_give_one_gradient(tmp_path: Path, kind: str) -> None:
    policy = load_policy(BY_KIND[kind].save(tmp_path), 1.0)
    results = []
    for budget in (10_000, 80):
        policy.zero_grad()
        packs = pack_rows(tiny_rows(), budget, layout=policy.rows.layout)
        for pack in packs:
            policy(pack).logprobs.sum().backward()
        results.append((len(packs), [one.grad.clone() for one in policy.parameters()]))
    assert results[0][0] == 1
    assert results[1][0] > 2
    for mine, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(mine, expected, atol=SAME, rtol=SAME)


@pytest.mark.parametrize("kind", ["Qwen3Next", "Llama4"])
def test_critic_and_recomputed_layers_take_the_same_rows(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    model = BY_KIND[kind].save(tmp_path)
    engine = FSDPEngine(model, TrainerConfig(advantage="gae", recompute=True, dtype="float32"), ranks)
    assert max(gaps(engine.policy, model)) <= SAME
    critic = engine.critic
    assert critic is not None
    torch.nn.init.ones_(critic.module.head.weight)
    given = tiny_rows()
    (together,) = engine.values([join_rows(given)])
    apart = torch.cat(engine.values([join_rows([row]) for row in given]))
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=SAME)


@pytest.mark.parametrize("kind", ["Qwen3Next", "DeepseekV32"])
def test_a_checkpoint_restores_weights_and_moments(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Also where some weights never learn: an indexer chooses keys, without gradient."""
    model, store = BY_KIND[kind].save(tmp_path / "model"), CheckpointStore(tmp_path / "checkpoints", keep=1)
    pack = join_rows(tiny_rows())
    first, second = (FSDPEngine(model, TrainerConfig(lr=1e-3, dtype="float32"), ranks) for _ in range(2))

    def step(engine: FSDPEngine) -> None:
        assert not engine.update([pack], lambda pack, outputs: -outputs.logprobs.sum(), 100.0, 0).skipped

    step(first)
    first.begin_save(store.unfinished(1)).result(timeout=300)
    store.seal(1, DataCursor(), ranks.world, {})
    info = newest(store)
    second.load(info.path, info.ranks)
    step(first)
    step(second)
    assert torch.equal(*(engine.score([pack])[0] for engine in (first, second)))


def test_the_choice_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_policy(BY_KIND["Llama4"].save(tmp_path), 1.0)
    said = [record.message for record in caplog.records if "rows padded" in record.message]
    assert len(said) == 1
    assert "attention_chunk_size" in said[0]


def test_context_parallelism_is_refused_by_name(tmp_path: Path) -> None:
    policy = load_policy(BY_KIND["Llama4"].save(tmp_path), 1.0)
    named = r"^Llama4TextAttention .*attention_chunk_size.*set trainer.parallel.context to 1$"
    with pytest.raises(CannotSplitModel, match=named):
        import_module(f"{INSIDE}.sharded").check_context(policy, RankLayout(context=2))


def test_a_part_of_a_larger_model_has_the_names_of_its_files(tmp_path: Path) -> None:
    """Qwen3.5 on the hub: its text model beside one for pictures."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    words = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    text = {**SHAPE, **BY_KIND["Qwen3_5"].changes}
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config={**vision, "num_position_embeddings": 16}, **words
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), 1.0)
    assert policy.rows.row_by_row
    names = policy.names.parts["model.layers.0.linear_attn.A_log"].names
    assert names == ("model.language_model.layers.0.linear_attn.A_log",)


SMALL_HEADS = {"vocab_size": 152_064, "hidden_size": 256, "head_dim": 32, "num_attention_heads": 8}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64}
GEMMA_4 = {
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    **{"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 6},
    **{"enable_moe_block": True, "num_experts": 64, "top_k_experts": 8, "moe_intermediate_size": 128},
    "hidden_size_per_layer_input": 8,
}
CHOSEN = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 12,
}


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Qwen3Moe", {"num_hidden_layers": 48, "num_experts": 128}, ""),
        ("Qwen3Next", {"num_hidden_layers": 12, **DELTA}, ""),
        ("Bamba", {"num_hidden_layers": 12, "attn_layer_indices": [3, 9], **MAMBA}, ""),
        ("FalconH1", {"num_hidden_layers": 2, "mamba_d_ssm": 256, "mamba_n_heads": 8}, ""),
        ("NemotronH", {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3}, ""),
        ("Gemma4", GEMMA_4, ""),
        ("GptOss", {"num_hidden_layers": 12, "num_local_experts": 8}, ""),
        ("Llama4", {"num_hidden_layers": 12}, "chunk"),
        ("DeepseekV32", CHOSEN, "index_topk"),
    ],
)
def test_of_a_large_model_a_small_copy_is_tried(
    tmp_path: Path, ranks: Ranks, kind: str, changes: dict[str, Any], why: str
) -> None:
    """It has each kind of layer; the pad token lies beyond the copy's words."""
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config(**{**SMALL_HEADS, **changes}, pad_token_id=151_643).save_pretrained(tmp_path)
    trial = try_copy(str(tmp_path), ranks)
    assert replace(trial, unpacked_because="") == Trial(copied=True)
    assert why in trial.unpacked_because
    assert bool(trial.unpacked_because) == bool(why)


def test_a_small_copy_of_a_larger_model_is_tried(tmp_path: Path, ranks: Ranks) -> None:
    """Gemma 4 as it is published: the model of text computes with its pad token."""
    text = {**SHAPE, **BY_KIND["Gemma4"].changes}
    transformers.Gemma4Config(text_config=text).save_pretrained(tmp_path)
    assert try_copy(str(tmp_path), ranks) == Trial(copied=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: the kernels run on one only")
@pytest.mark.parametrize("kind", ["Qwen3Next", "NemotronH", "Lfm2"])
def test_kernels_that_are_given_bounds_keep_rows_apart(tmp_path: Path, kind: str) -> None:
    policy = load_policy(BY_KIND[kind].save(tmp_path), 1.0)
    assert policy.rows.layout is RowLayout.PACKED
    policy.cuda()
    given = tiny_rows()
    with torch.no_grad():
        together = policy(join_rows(given).to("cuda")).logprobs
        apart = torch.cat([policy(join_rows([row]).to("cuda")).logprobs for row in given])
    torch.testing.assert_close(together, apart, atol=1e-3, rtol=1e-3)
