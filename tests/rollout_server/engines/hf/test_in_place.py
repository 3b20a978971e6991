"""Where tensors go in a model that receives them in place: all of it is planned before a byte is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from penstock.rollout_server.engines.hf.in_place import InPlaceReceiver, InPlaceTargets
from penstock.weight_sync import (
    HubNames,
    StreamTensor,
    TensorEntry,
    WeightPublisher,
    WeightsRefused,
    checksum,
    dtype_name,
    tensor_parts,
)

pytestmark = pytest.mark.torch
BUCKET = 1000


def described(tensors: dict[str, Any]) -> list[StreamTensor]:
    return [StreamTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]


def write(targets: InPlaceTargets, tensors: dict[str, Any]) -> None:
    stream = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]).numpy().data
    buckets = (stream[at : at + BUCKET] for at in range(0, len(stream), BUCKET))
    for part in tensor_parts(described(tensors), buckets):
        targets.write(part)


def entries(tensors: dict[str, Any]) -> list[TensorEntry]:
    return [
        TensorEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor))
        for name, tensor in tensors.items()
    ]


class Case:
    """A model, and another version of it under its files' names."""

    def __init__(self, folder: Path, kind: str, **changes: Any) -> None:
        path = save_tiny_model(folder, kind, **changes)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        stored = load_file(Path(path) / "model.safetensors")
        self.names = HubNames.of(self.model, stored)
        generator = torch.Generator().manual_seed(1)
        self.version = {name: torch.randn(one.shape, generator=generator) for name, one in stored.items()}

    def targets(self, tensors: dict[str, Any]) -> InPlaceTargets:
        return InPlaceTargets(self.model, described(tensors), self.names, 7)

    def holds(self, tensors: dict[str, Any]) -> bool:
        wanted, state = self.names.joined(tensors), self.model.state_dict()
        return all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in wanted.items())


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_hold_what_came_in_buckets(kind: str, dtype: Any, tmp_path: Path) -> None:
    """Experts, of which several tensors make one parameter, and values that are rounded, too."""
    changes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if kind == "Qwen3Moe" else {}
    case = Case(tmp_path, kind, tie_word_embeddings=True, **changes)
    tensors = {name: tensor.to(dtype) for name, tensor in case.version.items()}
    targets = case.targets(tensors)
    assert not case.holds(tensors)
    write(targets, tensors)
    targets.verify(entries(tensors))
    assert case.holds(tensors)


def test_what_does_not_fit_is_refused_before_it_comes(tmp_path: Path) -> None:
    case = Case(tmp_path, "Qwen3", tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in case.version.items() if key != name}
    surplus = {**case.version, "model.layers.9.mlp.up_proj.weight": case.version[name]}
    misshapen = {**case.version, name: case.version[name][:-1]}
    integers = {**case.version, name: case.version[name].to(torch.int32)}
    for tensors, text in ((missing, name), (surplus, "layers.9.mlp"), (misshapen, name), (integers, name)):
        with pytest.raises(WeightsRefused, match=text):
            case.targets(tensors)
    assert all(torch.equal(tensor, before[key]) for key, tensor in case.model.state_dict().items())


def test_tied_tensors_that_came_different_are_no_version(tmp_path: Path) -> None:
    case = Case(tmp_path, "Qwen3", tie_word_embeddings=True)
    embedding = case.version["model.embed_tokens.weight"]
    for head, sound in ((embedding, True), (embedding + 1, False)):
        both = {**case.version, "lm_head.weight": head}
        targets = case.targets(both)
        write(targets, both)
        if sound:
            targets.check_tied(entries(both))
            targets.verify(entries(both))
            continue
        with pytest.raises(WeightsRefused, match="tied but differ"):
            targets.check_tied(entries(both))


class Standing:
    """A batcher that nothing decodes in."""

    stands_still = False

    def halt(self) -> None:
        self.stands_still = True

    def go_on(self) -> None:
        self.stands_still = False


def test_a_file_is_copied_piece_by_piece_once_all_of_it_is_checked(tmp_path: Path) -> None:
    case = Case(tmp_path / "model", "Qwen3", tie_word_embeddings=True)
    receiver = InPlaceReceiver(case.model, Standing(), lambda: case.names)
    publisher = WeightPublisher(tmp_path / "published", "shm")
    manifest = publisher.write(1, case.version.items())
    with receiver.opened(manifest) as load:
        assert not case.holds(case.version)
        load()
    assert case.holds(case.version)
    other = publisher.write(2, {name: tensor + 1 for name, tensor in case.version.items()}.items())
    data = bytearray(Path(other.place).read_bytes())
    data[-2] ^= 0xFF
    Path(other.place).write_bytes(data)
    with pytest.raises(WeightsRefused, match=other.tensors[-1].name), receiver.opened(other):
        raise AssertionError("it does not verify")
    assert case.holds(case.version)
