"""A version of the weights is exactly the model's tensors, or it is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout_server import EngineError
from penstock.rollout_server.engines.checkpoint import (
    check_complete,
    fetch_model,
    start_deadline_s,
    tensor_shapes,
    vocab_size,
)
from penstock.weight_sync import ChainFile, Manifest, TensorEntry, WeightsRefused

SHAPES = {"embed.weight": (8, 4), "layer.weight": (4, 4)}


def manifest(**shapes: list[int]) -> Manifest:
    tensors = tuple(TensorEntry(f"{name}.weight", tuple(shape), "float32", "0") for name, shape in shapes.items())
    return Manifest("shm", (ChainFile(3, None, "/weights", 9, "", ""),), tensors)


def test_the_models_own_tensors_pass_with_the_head_or_without() -> None:
    check_complete(manifest(embed=[8, 4], layer=[4, 4]), SHAPES)
    check_complete(manifest(embed=[8, 4], layer=[4, 4], lm_head=[8, 4]), SHAPES)
    check_complete(manifest(embed=[8, 4], layer=[4, 4]), {**SHAPES, "lm_head.weight": (8, 4)})


def test_nothing_is_refused_where_nothing_is_known_of_the_model() -> None:
    check_complete(manifest(embed=[8, 4]), {})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"embed": [8, 4]}, "'layer.weight' is missing"),
        ({"embed": [8, 4], "layer": [4, 4], "more": [1]}, "'more.weight' does not belong"),
        ({"embed": [8, 4], "layer": [4, 3]}, r"'layer.weight' has shape \[4, 3\]"),
    ],
)
def test_any_difference_is_refused_by_name(given: dict[str, list[int]], text: str) -> None:
    with pytest.raises(WeightsRefused, match=text):
        check_complete(manifest(**given), SHAPES)


def test_shapes_are_read_from_every_safetensors_file_of_the_folder(tmp_path: Path) -> None:
    for name, shape in SHAPES.items():
        entry = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}
        header = json.dumps(entry).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert tensor_shapes(str(tmp_path)) == SHAPES
    assert tensor_shapes("no/such/folder") == {}


def test_a_folder_without_a_config_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json") as caught:
        vocab_size(str(tmp_path))
    assert not caught.value.retryable


def test_a_start_has_more_time_for_more_weights(tmp_path: Path) -> None:
    assert start_deadline_s(180.0, tmp_path) == 180.0
    assert start_deadline_s(180.0, tmp_path / "nothing") == 180.0
    with (tmp_path / "model-1.safetensors").open("wb") as file:
        file.truncate(3_000_000_000)  # a hole: no bytes are written
    assert start_deadline_s(180.0, tmp_path) == 210.0


def test_a_folder_is_not_looked_for_in_the_hub(tmp_path: Path) -> None:
    assert fetch_model(str(tmp_path)) == tmp_path
    assert fetch_model(str(tmp_path / "nothing")) == tmp_path / "nothing", "the engine says what is wrong with it"


def test_a_model_of_the_hub_is_fetched_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        fetched.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    (tmp_path / "model.safetensors").touch()
    assert fetch_model("team/model") == tmp_path
    assert [one["name"] for one in fetched] == ["team/model"]
    (tmp_path / "model.safetensors").unlink()
    fetch_model("team/model")
    assert fetched[-1]["allow_patterns"] == "*.bin", "there are no others"


def test_a_model_that_the_hub_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no way to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(EngineError, match="no-such/model is neither a folder nor in the hub's cache"):
        fetch_model("no-such/model")
