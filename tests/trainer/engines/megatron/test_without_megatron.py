"""What the engine is made of, as far as it can be shown without megatron-core.

Refusals, names of experts, arithmetic of a model, layouts of a pack, and which experts a router is given.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.tiny_model import SHAPE, save_tiny_model

from penstock.rollout_server import MixtureLayers, Mixtures, NoRouters
from penstock.trainer import BadJob, Pack, TrainerConfig
from penstock.trainer.batch import Row
from penstock.trainer.engine import Flops
from penstock.trainer.engines.megatron import settings
from penstock.trainer.engines.megatron.bridge import grouped_name
from penstock.trainer.engines.megatron.engine import flops_of
from penstock.trainer.engines.megatron.inputs import cut_rows, rectangle
from penstock.trainer.engines.megatron.routing import StageRouters
from penstock.trainer.packing import empty_pack, join_rows

pytestmark = pytest.mark.torch


# refusals ------------------------------------------------------------------------------------------------------------
def test_a_machine_without_megatron_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_is_installed", lambda module: False)
    with pytest.raises(
        BadJob, match=r"megatron\.core and mbridge not installed in this Python; scripts/setup-megatron"
    ):
        settings.check_machine(TrainerConfig(engine="megatron"))


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_is_installed", lambda module: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadJob, match="computes on NVIDIA GPUs, and torch sees none here"):
        settings.check_machine(TrainerConfig(engine="megatron"))


@pytest.mark.parametrize(
    ("dtype", "reason"), [("bfloat16", "that is not installed in this Python"), ("float32", "dtype is float32")]
)
def test_context_parallelism_without_its_kernels_is_refused(
    dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"megatron.core", "mbridge"} | ({"transformer_engine"} if dtype == "float32" else set())
    monkeypatch.setattr(settings, "_is_installed", lambda module: module in installed)
    monkeypatch.setattr(settings, "require_gpu", lambda: None)
    config = TrainerConfig(engine="megatron", dtype=dtype, ranks=2, parallel={"context": 2})
    with pytest.raises(BadJob, match=reason):
        settings.check_machine(config)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 4}, "num_key_value_heads 2, which trainer.parallel.tensor 4 does not divide"),
        ({"pipeline": 4}, "num_hidden_layers 6, which trainer.parallel.pipeline 4 does not divide"),
        ({"expert": 2}, "num_experts None, which trainer.parallel.expert 2 does not divide"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(parallel: dict[str, int], message: str) -> None:
    shape = SimpleNamespace(num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, vocab_size=64)
    with pytest.raises(BadJob, match=message):
        settings.check_model(shape, TrainerConfig(parallel=parallel).parallel, "models/tiny")


def test_a_mixture_whose_weights_mbridge_would_normalise_is_refused() -> None:
    shape = SimpleNamespace(model_type="qwen3_moe", norm_topk_prob=False, num_hidden_layers=2)
    with pytest.raises(BadJob, match="norm_topk_prob"):
        settings.check_model(shape, TrainerConfig().parallel, "models/tiny")
    shape.norm_topk_prob = True
    settings.check_model(shape, TrainerConfig().parallel, "models/tiny")


def test_a_named_python_that_cannot_run_is_refused() -> None:
    with pytest.raises(BadJob, match=r"trainer\.megatron\.python: /nowhere/python cannot be run"):
        settings.find_python("/nowhere/python")


# names of experts ----------------------------------------------------------------------------------------------------
EXPERTS = "decoder.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{EXPERTS}.local_experts.1.linear_fc1.weight", f"{EXPERTS}.linear_fc1.weight5"),
        (f"{EXPERTS}.local_experts.0.linear_fc2.weight", f"{EXPERTS}.linear_fc2.weight4"),
        ("decoder.layers.3.mlp.router.weight", "decoder.layers.3.mlp.router.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
    ],
)
def test_experts_are_named_as_in_a_grouped_layer(name: str, expected: str) -> None:
    assert grouped_name(name, first_expert=4) == expected


# arithmetic of a model -----------------------------------------------------------------------------------------------
DENSE: dict[str, Any] = {
    "multi_latent_attention": False,
    "num_layers": SHAPE["num_hidden_layers"],
    "hidden_size": SHAPE["hidden_size"],
    "num_attention_heads": SHAPE["num_attention_heads"],
    "num_query_groups": SHAPE["num_key_value_heads"],
    "kv_channels": SHAPE["head_dim"],
    "ffn_hidden_size": SHAPE["intermediate_size"],
    "gated_linear_unit": True,
    "num_moe_experts": None,
}
MIXTURE = {**DENSE, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": 1}


def test_a_dense_model_counts_as_its_matrices(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, tie_word_embeddings=False))
    assert flops_of(SimpleNamespace(**DENSE), SHAPE["vocab_size"]) == Flops.of(model, learns_all=True)


@pytest.mark.parametrize(
    ("changes", "mlps"),
    [
        # router 32·4, two of four experts of 3·32·48
        ({"moe_shared_expert_intermediate_size": None}, 2 * (128 + 2 * 4608)),
        # and a shared one of 3·32·16
        ({"moe_shared_expert_intermediate_size": 16}, 2 * (128 + 2 * 4608 + 1536)),
        # the other layer has a plain MLP of 3·32·64
        ({"moe_shared_expert_intermediate_size": None, "moe_layer_freq": 2}, 128 + 2 * 4608 + 6144),
        ({"moe_shared_expert_intermediate_size": None, "moe_layer_freq": [0, 1]}, 128 + 2 * 4608 + 6144),
    ],
)
def test_a_mixture_counts_what_one_token_meets(changes: dict[str, Any], mlps: int) -> None:
    found = flops_of(SimpleNamespace(**{**MIXTURE, **changes}), 64)
    # queries and output 32·32 each, keys and values 32·16 each, in two layers
    assert found == Flops(body=2 * (2048 + 1024) + mlps, head=32 * 64, attention=2 * 32, learns_all=True)


def test_latent_attention_is_not_counted() -> None:
    assert flops_of(SimpleNamespace(**{**DENSE, "multi_latent_attention": True}), 64) is None


# layouts of a pack: every token has one place, fill-up is behind it, context ranks share each row out evenly ---------
def row_of(episode: int, ids: np.ndarray, experts: np.ndarray | None = None) -> Row:
    """From the second token on they are sampled."""
    targets, nothing = np.arange(1, len(ids)), np.zeros(len(ids) - 1, dtype=np.int64)
    mask = np.ones(len(targets), dtype=np.bool_)
    return Row(episode, ids, targets, nothing.astype(np.float32), nothing, mask, mask, nothing, None, experts)


def pack_of(lengths: list[int]) -> Pack:
    """Every token has an id of its own."""
    bounds = np.cumsum([1, *lengths])
    return join_rows([row_of(0, np.arange(*pair)) for pair in pairwise(bounds)])


LENGTHS = st.lists(st.integers(1, 17), min_size=1, max_size=6)


@given(LENGTHS, st.sampled_from([1, 2, 4]))
def test_a_rectangle_has_every_row_on_its_line(lengths: list[int], align: int) -> None:
    pack = pack_of(lengths)
    inputs = rectangle(pack, align)
    ids, mask = inputs.arguments["input_ids"], inputs.arguments["attention_mask"][0, 0]
    assert ids.shape[0] == len(lengths)
    assert ids.shape[1] % align == 0
    assert ids.shape[1] - max(lengths) < align
    for line, (row, length) in enumerate(zip(ids, lengths, strict=True)):
        assert row[:length].tolist() == pack.ids[pack.row_bounds[line] : pack.row_bounds[line + 1]].tolist()
        assert not row[length:].any()
    assert ids[inputs.line, inputs.column].tolist() == pack.ids[pack.predictors].tolist()
    # In the order of hidden states: positions first, then lines.
    assert ids.T.flatten()[inputs.place].tolist() == pack.ids[inputs.tokens].tolist() == pack.ids.tolist()
    assert inputs.size == ids.numel()
    assert mask.tolist() == [[hidden > seen for hidden in range(ids.shape[1])] for seen in range(ids.shape[1])]


@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_context_ranks_share_every_row_out(lengths: list[int], contexts: int, tensor: int) -> None:
    """Each rank's tokens are the pieces that megatron-core's attention expects, cut by hand from the filled rows."""
    pack = pack_of(lengths)
    align = tensor * (2 * contexts if contexts > 1 else 1)
    filled = [-(-length // align) * align for length in lengths]
    starts = pack.row_bounds.tolist()
    for context in range(contexts):
        cut = cut_rows(pack, align, contexts, context)
        ids = torch.zeros(cut.length, dtype=torch.long)
        ids[cut.place[cut.mine]] = pack.ids[cut.mine]
        expected: list[int] = []
        for start, length, size in zip(starts, lengths, filled, strict=False):
            row = pack.ids[start : start + length].tolist() + [0] * (size - length)
            pieces = np.array_split(row, 2 * contexts)
            chosen = [row] if contexts == 1 else [pieces[context], pieces[2 * contexts - 1 - context]]
            expected += [int(one) for piece in chosen for one in piece]
        assert ids.tolist() == expected
        assert cut.bounds.tolist() == np.cumsum([0, *filled]).tolist()
        assert cut.length % tensor == 0


def test_a_layout_waits_for_no_device() -> None:
    """A tensor on meta has no values to be read."""
    pack = pack_of([5, 1, 3]).to(torch.device("meta"))
    assert rectangle(pack, 2).arguments["input_ids"].shape == (3, 6)
    cut = cut_rows(pack, 4, 2, 0)
    assert (cut.length, cut.longest) == (8, 8)


def test_an_empty_pack_has_a_layout() -> None:
    inputs = rectangle(empty_pack(), 2)
    assert inputs.arguments["input_ids"].tolist() == [[0, 0]]
    assert len(inputs.own) == len(inputs.line) == len(inputs.column) == 0


# routers -------------------------------------------------------------------------------------------------------------
LAYERS = MixtureLayers(Mixtures(3, 8, 2), all_layers=4, with_experts=(0, 2, 3))


def layer_of(number: int, *, topk: int | None = 2, **config: Any) -> Any:
    """Layer `number`, from 1; `topk` None: without experts. Its forward answers with what its router would send on."""
    if topk is None:
        return SimpleNamespace(layer_number=number, mlp=SimpleNamespace(), forward=lambda **given: given)
    settings = SimpleNamespace(num_moe_experts=8, **config)
    router = SimpleNamespace(topk=topk, config=settings, router_replay=None)

    def forward(scores: Any, **given: Any) -> Any:
        plain = lambda values, k, groups, group_topk: torch.topk(values, k, dim=1)  # noqa: E731
        return (*router.router_replay.get_replay_topk(scores, 2, None, None, plain), given)

    return SimpleNamespace(layer_number=number, mlp=SimpleNamespace(router=router), forward=forward)


def routers_of(*layers: Any) -> StageRouters:
    decoder = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False), layers=list(layers))
    return StageRouters([SimpleNamespace(decoder=decoder)], LAYERS, torch.device("cpu"))


def test_a_layer_reads_its_own_column_of_the_record() -> None:
    """Of two rows on lines; the last token of each has no record, and what fills up the shorter one neither."""
    rows = []
    for number, length in enumerate((3, 2)):
        experts = np.array([[[token, 7], [token, 6], [token, 5]] for token in range(length)], dtype=np.uint8)
        experts[-1] = 0
        rows.append(row_of(number, np.arange(length), experts))
    pack, (second, third) = join_rows(rows), (layer_of(3), layer_of(4))
    routers = routers_of(second, third)
    assert routers.columns == [1, 2]
    routing = routers.arguments(pack, rectangle(pack, 1))["extra_block_kwargs"]["attention_bias"]
    assert routing.real.tolist() == [True, True, True, True, True, False]  # position by position, line by line
    scores = torch.arange(8.0).expand(6, 8).clone().requires_grad_()
    for layer, expert in ((second, 6), (third, 5)):
        found, chosen, given = layer.forward(scores=scores, attention_bias=routing, attention_mask=None)
        assert chosen.tolist() == [[0, expert], [0, expert], [1, expert], [7, 6], [7, 6], [7, 6]]
        assert torch.equal(found, scores.gather(1, chosen))
        assert given == {"attention_mask": None}
        # The next call is not given these experts.
        assert layer.forward(scores=scores)[1].tolist() == [[7, 6]] * 6


def test_a_layer_without_experts_is_given_no_experts() -> None:
    dense = layer_of(2, topk=None)
    assert routers_of(layer_of(1), dense).columns == [0]
    assert dense.forward(attention_bias=object(), attention_mask=None) == {"attention_mask": None}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer_of(1), layer_of(2)], r"layers \[0, 1\] with experts, where the model's settings say \[0\]"),
        ([layer_of(3, topk=4)], "4 of 8 experts, where the model's settings say 2 of 8"),
        ([layer_of(3, moe_router_fusion=True)], "moe_router_fusion"),
        ([layer_of(3, moe_router_load_balancing_type="sinkhorn")], "moe_router_load_balancing_type"),
    ],
)
def test_routers_that_cannot_be_replayed_are_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(NoRouters, match=message):
        routers_of(*layers)
