"""What an engine holds against what was published: fused, padded and tied parameters; the first difference by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from penstock.rollout_server.engines.verify_loaded import Comparison, Excerpts, Sample, compare_excerpts, compare_held

pytestmark = pytest.mark.torch


def published() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q_proj": (8, 4), "k_proj": (2, 4), "v_proj": (2, 4), "o_proj": (4, 8)}
    layer = {f"layers.0.attn.{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    return {"embed.weight": torch.randn(10, 4, generator=generator), **layer, "norm.weight": torch.ones(4)}


def held(dtype: Any = torch.float32) -> dict[str, Any]:
    """As an engine has it: fused, and with the vocabulary padded to 16."""
    given = {name: tensor.to(dtype) for name, tensor in published().items()}
    fused = torch.cat([given.pop(f"layers.0.attn.{part}_proj.weight") for part in "qkv"])
    padded = torch.cat([given.pop("embed.weight"), torch.zeros(6, 4, dtype=dtype)])
    return {"embed.weight": padded, "layers.0.attn.qkv_proj.weight": fused, **given}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_keeps_its_order_is_compared(dtype: Any) -> None:
    assert compare_held(held(dtype).items(), published()) == Comparison(equal=4, incomparable=0)


@pytest.mark.parametrize("name", list(held()))
def test_one_other_value_is_found_by_name(name: str) -> None:
    parameters = held()
    parameters[name].view(-1)[0] += 1
    assert compare_held(parameters.items(), published()).different == name


def test_stacked_in_another_order_is_different() -> None:
    parameters = held()
    fused = parameters["layers.0.attn.qkv_proj.weight"]
    parameters["layers.0.attn.qkv_proj.weight"] = fused.flip(0)
    assert compare_held(parameters.items(), published()).different == "layers.0.attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [*((one, "quantised") for one in (torch.float8_e4m3fn, torch.int8, torch.uint8)), (torch.float32, "transposed")],
)
def test_parameters_in_another_form_are_skipped_with_their_reason(dtype: Any, reason: str) -> None:
    """Under online fp8 an engine keeps a square weight scaled, and transposed."""
    name, weight = "layers.0.attn.o_proj.weight", torch.randn(4, 4)
    found = compare_held([(name, weight.to(dtype).t())], {name: weight})
    assert (found, found.reasons) == (Comparison(equal=0, incomparable=1), {reason: 1})
    assert found.reasons_text == f" ({reason}: 1)"


def test_a_comparison_in_pieces_finds_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout_server.engines.verify_loaded.PIECE_VALUES", 5)
    parameters = held()
    assert compare_held(parameters.items(), published()) == Comparison(equal=4, incomparable=0)
    parameters["layers.0.attn.qkv_proj.weight"].view(-1)[-1] += 1
    assert compare_held(parameters.items(), published()).different == "layers.0.attn.qkv_proj.weight"


def test_packed_split_and_unknown_parameters_are_counted() -> None:
    parameters = held()
    parameters["layers.0.attn.qkv_proj.weight"] = torch.empty(0)  # a packed copy lies elsewhere
    parameters["layers.0.attn.o_proj.weight"] = parameters["layers.0.attn.o_proj.weight"][:, :4]  # of two ranks
    parameters["rotary.cache"] = torch.ones(3)
    assert compare_held(parameters.items(), published()) == Comparison(equal=2, incomparable=3)


def test_samples_of_some_versions_are_all_values() -> None:
    """A stale layer shows at once, one wrong value in the version whose turn it is."""
    sampled = [{piece for piece in range(40) if Sample(16, turn).takes(piece)} for turn in range(16)]
    assert all(0 in pieces and len(pieces) <= 4 for pieces in sampled)
    assert set().union(*sampled) == set(range(40))


def test_a_sample_finds_what_it_looks_at() -> None:
    published = {"a.weight": torch.arange(160.0).reshape(40, 4)}
    held = {"a.weight": published["a.weight"].clone()}
    held["a.weight"][17, 2] += 1
    found = [compare_held(held.items(), published, Sample(16, turn, 4)).different for turn in range(16)]
    assert [turn for turn, name in enumerate(found) if name] == [15], "piece 17 is of the versions whose turn is 15"
    held["a.weight"] += 1
    assert all(compare_held(held.items(), published, Sample(16, turn, 4)).different for turn in range(16))


def test_host_memory_is_compared_whole() -> None:
    assert Sample.of(7, torch.device("cpu")).every == 1
    assert Sample.of(7, torch.device("cuda")) == Sample(16, 7, 1 << 18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_rows_are_compared_where_no_copy_is_left(dtype: Any) -> None:
    excerpts = Excerpts()
    assert [name for name, _ in excerpts.noted(published().items())] == list(published())
    assert compare_excerpts(held(dtype).items(), excerpts.forms, excerpts.rows) == Comparison(equal=4, incomparable=0)
    for name in held():
        parameters = held(dtype)
        parameters[name].view(-1)[0] += 1
        assert compare_excerpts(parameters.items(), excerpts.forms, excerpts.rows).different == name


def test_excerpt_is_small_and_of_no_expert() -> None:
    excerpts = Excerpts()
    tensors = {
        "wide.weight": torch.zeros(4, 5000),
        "long.weight": torch.zeros(5000, 2),
        "x.experts.0.w": torch.zeros(3, 3),
    }
    assert len(list(excerpts.noted([*tensors.items(), ("scale", torch.tensor(1.0))]))) == 4
    assert {name: tuple(rows.shape) for name, rows in excerpts.rows.items()} == {
        "wide.weight": (1, 5000),
        "long.weight": (512, 2),
    }
