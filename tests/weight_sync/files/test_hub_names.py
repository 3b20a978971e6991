"""Parameters under the files' names and back, to the bit, whatever the model's sizes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from tests.tiny_model import SHAPE, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, HrmTextConfig, HrmTextForCausalLM

from penstock.weight_sync import HubNames, UnmappedTensors

pytestmark = pytest.mark.torch
MIXTURES = {
    "Qwen3Moe": ("num_experts", "mlp.experts.{expert}.gate_proj.weight"),
    "Qwen2Moe": ("num_experts", "mlp.experts.{expert}.gate_proj.weight"),
    "Mixtral": ("num_local_experts", "block_sparse_moe.experts.{expert}.w1.weight"),
    "Olmoe": ("num_experts", "mlp.experts.{expert}.gate_proj.weight"),
}
"""Kind → its config's name for the number of experts, and one expert's tensor in its files."""


def files_of(model: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(Path(model) / "model.safetensors")
    return found


def shell_of(model: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))


@settings(max_examples=12)
@given(
    kind=st.sampled_from([*MIXTURES, "Qwen3", "Gemma2", "Llama"]),
    experts=st.integers(2, 6),
    width=st.sampled_from([2, 8, 24]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    whole=st.booleans(),
)
def test_split_gives_the_files_and_join_the_parameters(
    kind: str, experts: int, width: int, layers: int, tied: bool, whole: bool
) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    if kind in MIXTURES:
        changes |= {MIXTURES[kind][0]: experts, "num_experts_per_tok": 2, "intermediate_size": width}
        changes |= {} if kind in ("Mixtral", "Olmoe") else {"moe_intermediate_size": width}
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder), kind, **changes)
        stored = files_of(model)
        loaded = AutoModelForCausalLM.from_pretrained(model)
        shell = loaded if whole else shell_of(model)
        names = HubNames.of(shell, stored)
    names.check(shell.state_dict(), {name: tuple(tensor.shape) for name, tensor in stored.items()})
    assert not names.missing | names.unexpected | names.ignored
    made = {}
    for name, parameter in loaded.named_parameters():
        parts = dict(names.split(name, parameter.detach()))
        made |= parts
        assert torch.equal(names.join(name, parts), parameter)
        for place, row in enumerate(names.experts(name) or ()):
            assert torch.equal(names.join(name, {one: stored[one] for one in row})[0], parameter[place])
            of_one = dict(names.split_experts(name, parameter[place : place + 1].detach(), place))
            assert of_one.keys() == set(row)
            assert all(torch.equal(tensor, stored[one]) for one, tensor in of_one.items())
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in stored.items())
    joined = names.joined(stored)
    assert joined.keys() == {name for name, _ in loaded.named_parameters()}
    assert all(torch.equal(joined[name], parameter) for name, parameter in loaded.named_parameters())
    if kind in MIXTURES:
        last = MIXTURES[kind][1].format(expert=experts - 1)
        assert f"model.layers.{layers - 1}.{last}" in made


def test_what_lacks_or_has_other_tensors_is_named(mixture: tuple[Any, dict[str, torch.Tensor]]) -> None:
    shell, stored = mixture
    norm, down = f"{LAYER}.input_layernorm.weight", "model.layers.1.mlp.experts.2.down_proj.weight"
    names = HubNames.of(shell, stored.keys() - {norm} | {f"{LAYER}.stray.weight"})
    assert (names.missing, names.unexpected) == ({norm}, {f"{LAYER}.stray.weight"})
    state, shapes = shell.state_dict(), {name: tuple(tensor.shape) for name, tensor in stored.items()}
    with pytest.raises(UnmappedTensors, match=rf"{down}"):
        HubNames.of(shell, stored).check(state, {**shapes, down: (32, 15)})
    lacking = {f"{LAYER}.mlp.experts.{number}.down_proj.weight" for number in (2, 3)}
    with pytest.raises(UnmappedTensors, match=rf"as other tensors: {LAYER}\.mlp\.experts\.2\.down_proj"):
        HubNames.of(shell, stored.keys() - lacking).check(state)


def test_a_tied_head_has_one_tensor_in_the_files(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tie_word_embeddings=True)
    stored = set(files_of(model))
    shell = shell_of(model)
    assert HubNames.of(shell, stored).parts_of("lm_head.weight").names == ("model.embed_tokens.weight",)
    swapped = HubNames.of(shell, stored - {"model.embed_tokens.weight"} | {"lm_head.weight"})
    assert swapped.parts_of("model.embed_tokens.weight").names == ("lm_head.weight",)
    assert not swapped.missing
    assert HubNames.of(shell, stored | {"lm_head.weight"}).tied_twice


def test_without_files_it_is_what_transformers_saves(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": True}
    model = save_tiny_model(tmp_path, "Qwen3Moe", **changes)
    names = HubNames.of(shell_of(model))
    assert {one for parts in names.parts.values() for one in parts.names} >= files_of(model).keys()


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Qwen3Moe of four experts on the device meta, and the tensors of its files."""
    model = save_tiny_model(tmp_path, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return shell_of(model), files_of(model)


LAYER = "model.layers.0"


def test_rows_of_experts_are_made_of_their_own_tensors(mixture: tuple[Any, dict[str, torch.Tensor]]) -> None:
    names = HubNames.of(*mixture)
    experts = [f"{LAYER}.mlp.experts.{number}" for number in range(4)]
    assert names.experts(f"{LAYER}.mlp.experts.gate_up_proj") == [
        (f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in experts
    ]
    assert names.experts(f"{LAYER}.mlp.experts.down_proj") == [(f"{one}.down_proj.weight",) for one in experts]
    assert names.experts(f"{LAYER}.input_layernorm.weight") is None
    assert names.stored_name(f"{LAYER}.mlp.experts.down_proj") is None


def test_rows_of_experts_are_split_without_the_others(mixture: tuple[Any, dict[str, torch.Tensor]]) -> None:
    names, fused = HubNames.of(*mixture), f"{LAYER}.mlp.experts.gate_up_proj"
    rows = torch.randn(2, 32, 32)
    made = dict(names.split_experts(fused, rows, 1))
    assert made.keys() == {f"{LAYER}.mlp.experts.{n}.{part}_proj.weight" for n in (1, 2) for part in ("gate", "up")}
    assert torch.equal(made[f"{LAYER}.mlp.experts.2.up_proj.weight"], rows[1, 16:])
    held = rows.untyped_storage().data_ptr()
    assert {tensor.untyped_storage().data_ptr() for tensor in made.values()} == {held}, "views, no copies"
    assert not dict(names.split_experts(fused, rows[:0], 4))


def test_parameter_that_the_files_lack_keeps_its_name(mixture: tuple[Any, dict[str, torch.Tensor]]) -> None:
    norm = f"{LAYER}.input_layernorm.weight"
    names = HubNames.of(mixture[0], mixture[1].keys() - {norm})
    assert (names.stored_name(norm), names.missing) == (norm, {norm})
    assert [(name, tensor.shape) for name, tensor in names.split(norm, torch.zeros(2))] == [(norm, (2,))]


def test_two_tensors_of_one_parameter_are_refused(mixture: tuple[Any, dict[str, torch.Tensor]]) -> None:
    norm = "layers.0.input_layernorm.weight"
    with pytest.raises(UnmappedTensors, match=rf"tensors {norm}, model\.{norm} are the same parameter"):
        HubNames.of(mixture[0], mixture[1].keys() | {norm})


def test_tensor_of_several_parameters_is_refused() -> None:
    """Not called a lack of the files, which are whole."""
    with torch.device("meta"):
        model = HrmTextForCausalLM(HrmTextConfig(**SHAPE))
    with pytest.raises(UnmappedTensors, match=r"gqkv_proj\.weight of its files is several parameters .*q_proj"):
        HubNames.of(model)
