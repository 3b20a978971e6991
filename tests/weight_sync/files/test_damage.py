"""Files of another form than expected: each is refused by name, and none ends the process that reads it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from tests.weight_sync.conftest import altered, file_of, parts_of, small_tensors

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from penstock.weight_sync import (
    Manifest,
    Merger,
    NoSpace,
    WeightPublisher,
    WeightReader,
    WeightsRefused,
    open_published,
    read_verified,
)
from penstock.weight_sync.files.delta import BadDelta, apply_change, words_of
from penstock.weight_sync.files.file_format import PartialFile
from penstock.weight_sync.files.file_reader import FileReader
from penstock.weight_sync.lora.adapter import AdapterConfig, BadAdapter

pytestmark = pytest.mark.torch
Header = dict[str, Any]


def announced(manifest: Manifest, content: bytes) -> Manifest:
    """The version, had the trainer written `content` and announced it: no checksum of the file tells them apart."""
    path = Path(manifest.place)
    path.unlink()
    path.write_bytes(content)
    own = replace(manifest.files[-1], bytes=len(content), xxh3="")
    return replace(manifest, files=(*manifest.files[:-1], own))


# the file ------------------------------------------------------------------------------------------------------------
def entry(**changes: object) -> Callable[[Header, bytes], bytes]:
    def damage(header: Header, data: bytes) -> bytes:
        header["m"].update(changes)
        return file_of(header, data)

    return damage


DAMAGE: dict[str, tuple[Callable[[Header, bytes], bytes], str]] = {
    "no length": (lambda _header, _data: b"1234567", "is no safetensors file"),
    "a length that no memory has": (lambda _header, data: struct.pack("<Q", 1 << 62) + data, "is no safetensors file"),
    "a length of one too many": (lambda _header, data: struct.pack("<Q", len(data) + 1) + data, "no safetensors file"),
    "no header at all": (lambda _header, _data: struct.pack("<Q", 0), "damaged header"),
    "no header": (lambda _header, data: file_of(3, data), "damaged header"),
    "no JSON": (lambda _header, data: struct.pack("<Q", 4) + b"{{{{" + data, "damaged header"),
    "an unknown dtype": (entry(dtype="F4"), "damaged header.*F4"),
    "negative sizes": (entry(shape=[-2, -3]), r"damaged header.*'m' has shape \[-2, -3\]"),
    "sizes that are no integers": (entry(shape=[2.0, 3.0]), "damaged header.*'m' has shape"),
    "too short for its shape": (entry(shape=[2, 2]), "damaged header.*'m' is at 0 to 24"),
    "a gap": (entry(data_offsets=[4, 28]), "damaged header.*'m' is at 4 to 28"),
    "bytes of no tensor": (lambda header, data: file_of(header, data + b"12345678"), "describes 24 of 32 bytes"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_refused_by_what_is_wrong(
    tmp_path: Path, damage: Callable[[Header, bytes], bytes], problem: str
) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"m": torch.rand(2, 3)}.items())
    with pytest.raises(WeightsRefused, match=f"version 1: .*{Path(manifest.place).name}.*{problem}"):
        read_verified(announced(manifest, damage(*parts_of(Path(manifest.place)))))


def test_damaged_form_of_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"m": torch.rand(2, 3)}.items())
    for change in ({"shape": [-1, -6]}, {"dtype": "complex64"}):
        other = altered(manifest, lambda plain, change=change: plain["tensors"][0].update(change))
        with pytest.raises(WeightsRefused, match="version 1: tensor 'm' "):
            read_verified(other)


def test_file_of_tensors_without_a_byte_is_read(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"a": torch.empty(0, 4), "b": torch.empty(2, 0)}.items())
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in read_verified(manifest).items()} == {
        "a": ((0, 4), torch.float32),
        "b": ((2, 0), torch.float32),
    }


def test_file_of_more_than_one_piece_is_read(tmp_path: Path) -> None:
    """Files are read by the MiB."""
    sent = {"a": torch.rand(700_001), "b": torch.rand(5)}
    found = read_verified(WeightPublisher(tmp_path, "shm").write(1, sent.items()))
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_file_on_its_way_keeps_what_came_before(tmp_path: Path) -> None:
    part = PartialFile(tmp_path / "part")
    part.append(b"first")
    assert (tmp_path / "part").read_bytes() == b"first", "a server that is killed loses nothing that came"
    part.close()
    with pytest.raises(ValueError, match="closed"):
        part.append(b"x")
    again = PartialFile(tmp_path / "part")
    assert (again.length, again.xxh3) == (5, xxhash.xxh3_64_hexdigest(b"first"))
    again.append(memoryview(b"second"))
    assert (again.length, again.xxh3) == (11, xxhash.xxh3_64_hexdigest(b"firstsecond"))
    again.close()


def test_damaged_file_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"m": torch.rand(2, 3)}.items())
    descriptor = open_published(manifest.files[-1])
    try:
        os.truncate(manifest.place, manifest.bytes - 4)
        with pytest.raises(WeightsRefused, match="was cut while it was read"):
            list(FileReader(manifest.files[-1], descriptor).tensors())
    finally:
        os.close(descriptor)


def test_damaged_file_is_refused_without_staying_open(tmp_path: Path) -> None:
    """A server meets the same one at every pull, for as long as it is announced."""
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"m": torch.rand(2, 3)}.items())
    own = manifest.files[-1]
    others = [replace(own, bytes=own.bytes + 1), replace(own, place=str(tmp_path)), replace(own, xxh3="0" * 16)]
    before = len(os.listdir("/proc/self/fd"))
    for file in others:
        with pytest.raises(WeightsRefused):
            read_verified(replace(manifest, files=(file,)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_data_begins_at_a_multiple_of_eight(tmp_path: Path) -> None:
    """Readers map the file and look at it as numbers of up to eight bytes."""
    publisher = WeightPublisher(tmp_path, "shm")
    for length in range(1, 9):
        raw = Path(publisher.write(length, {"n" * length: torch.rand(2)}.items()).place).read_bytes()
        assert struct.unpack("<Q", raw[:8])[0] % 8 == 0


# the delta -----------------------------------------------------------------------------------------------------------
def table_of(header: Header) -> list[list[Any]]:
    return json.loads(header["__metadata__"]["changes"])


DELTA_DAMAGE: dict[str, tuple[Callable[[list[list[Any]]], object], str]] = {
    "more bytes than there are": (lambda table: table[0].__setitem__(3, table[0][3] + 8), r"its table is about"),
    "another encoding": (lambda table: table[0].__setitem__(1, "whole"), "the change of tensor 'w': 2 values"),
    "half a value": (
        lambda table: table.__setitem__(slice(None), halved(table[0])),
        r"the change of tensor 'w': .*no whole number of values",
    ),
    "a negative length": (lambda table: table[0].__setitem__(2, -1), "a negative length"),
    "values of a negative length": (lambda table: table[0].__setitem__(3, -1), "a negative length"),
}


def test_delta_of_a_tensor_that_stays_as_it_was(tmp_path: Path) -> None:
    publisher, weights = WeightPublisher(tmp_path, "shm", full_every=4), torch.zeros(1000)
    reader = WeightReader()
    reader.read(publisher.write(1, {"v": torch.ones(2), "w": weights}.items()))
    weights[3] = 1
    manifest = publisher.write(2, {"v": torch.ones(2), "w": weights}.items())
    header, data = parts_of(Path(manifest.place))
    table = [*table_of(header), ["v", "gaps8", 0, 0, ""]]
    seal(table, data, header["index"]["data_offsets"][1])
    header["__metadata__"]["changes"] = json.dumps(table)
    assert reader.read(announced(manifest, file_of(header, data)))["v"].tolist() == [1, 1]


def halved(whole: list[Any]) -> list[list[Any]]:
    """One change as two, of which the first ends in the middle of a value."""
    name, encoding, index, values, _ = whole
    return [[name, encoding, index, values - 2, ""], [name, "whole", 0, 2, ""]]


@pytest.mark.parametrize(("damage", "problem"), DELTA_DAMAGE.values(), ids=DELTA_DAMAGE)
def test_damaged_delta_is_refused_by_what_is_wrong(
    tmp_path: Path, damage: Callable[[list[list[Any]]], object], problem: str
) -> None:
    publisher, weights = WeightPublisher(tmp_path, "shm", full_every=4), torch.zeros(1000)
    reader = WeightReader()
    reader.read(publisher.write(1, {"w": weights}.items()))
    weights[3], weights[700] = 1, 2
    manifest = publisher.write(2, {"w": weights}.items())
    header, data = parts_of(Path(manifest.place))
    table = table_of(header)
    damage(table)
    seal(table, data, header["index"]["data_offsets"][1])
    header["__metadata__"]["changes"] = json.dumps(table)
    with pytest.raises(WeightsRefused, match=problem):
        reader.read(announced(manifest, file_of(header, data)))


def seal(table: list[list[Any]], data: bytes, values_at: int) -> None:
    """Right checksums, so that nothing but the damage is wrong."""
    index_at = 0
    for row in table:
        index, values = data[index_at : index_at + row[2]], data[values_at : values_at + row[3]]
        row[4] = xxhash.xxh3_64_hexdigest(index + values)
        index_at, values_at = index_at + row[2], values_at + row[3]


def test_damaged_values_change_nothing() -> None:
    weights = words_of(torch.zeros(4))
    with pytest.raises(BadDelta, match="7 bytes are no whole number of values"):
        apply_change(weights, "whole", memoryview(b""), memoryview(b"\x01" * 7))
    assert not weights.any()


# the trainer's side --------------------------------------------------------------------------------------------------
TWICE = {"twice": ["a", "a"], "as metadata": ["__metadata__"]}


@pytest.mark.parametrize("names", TWICE.values(), ids=TWICE)
def test_publisher_refuses_a_name_that_is_taken(tmp_path: Path, names: list[str]) -> None:
    publisher = WeightPublisher(tmp_path, "shm")
    with pytest.raises(ValueError, match=f"'{names[-1]}' is given twice"):
        publisher.write(1, [(name, torch.rand(2)) for name in names])
    assert list(tmp_path.iterdir()) == []


def test_publisher_refuses_what_it_is_not_made_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http transport needs the URL"):
        WeightPublisher(tmp_path, "http")
    with pytest.raises(ValueError, match="model folder of version 0"):
        WeightPublisher(tmp_path, "shm").write_adapter(1, [], {"r": 1, "lora_alpha": 1})


@pytest.mark.parametrize("keep", [0, 1])
def test_publisher_keeps_one_version_at_least(tmp_path: Path, keep: int) -> None:
    publisher = WeightPublisher(tmp_path, "shm", keep)
    for version in (1, 2):
        publisher.write(version, small_tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000002.safetensors"]


def test_publisher_fills_the_room_but_for_16_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = WeightPublisher(tmp_path, "shm")
    needed = publisher.write(1, small_tensors().items()).bytes + (16 << 20)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(NoSpace, match="needs 16 MiB"):
            publisher.write(1, small_tensors().items())


def test_publisher_frees_each_tensor_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []

    def given() -> Iterator[tuple[str, Any]]:
        for name in "ab":
            tensor = torch.rand(9)
            freed.append(weakref.ref(tensor.untyped_storage()))
            yield name, tensor

    rename, seen = os.replace, list[bool]()

    def watched(source: Path, target: Path) -> None:
        seen.extend(one() is None for one in freed)
        rename(source, target)

    monkeypatch.setattr(os, "replace", watched)
    WeightPublisher(tmp_path, "shm").write(1, given())
    assert seen == [True, True]


def test_publisher_leaves_files_that_others_remove(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody tidies up at the same time."""
    unlink, removed = Path.unlink, list[str]()

    def unlink_second(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path.name.partition("-")[0])
            unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_second)
    (tmp_path / "published").mkdir(mode=0o700)
    (tmp_path / "published" / "left.tmp").touch()
    publisher = WeightPublisher(tmp_path / "published", "shm", 1, model=model)
    merger = Merger(model, tmp_path / "merged", "float32")
    for version in (1, 2):
        merger.merge(publisher.write_adapter(version, low().items(), {"r": 2, "lora_alpha": 2}))
    merger.close()
    assert removed == ["left.tmp", "weights", "merged", "merged"]


def test_publisher_calls_no_other_failure_a_lack_of_room(tmp_path: Path) -> None:
    (tmp_path / "weights-00000001.safetensors").mkdir()
    with pytest.raises(OSError, match="weights-00000001") as caught:
        WeightPublisher(tmp_path, "shm").write(1, small_tensors().items())
    assert not isinstance(caught.value, NoSpace)


# adapters ------------------------------------------------------------------------------------------------------------
def low(**others: Any) -> dict[str, Any]:
    return {
        "base_model.model.a.lora_A.weight": torch.ones(2, 4),
        "base_model.model.a.lora_B.weight": torch.ones(3, 2),
        **others,
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(3, 4)}, folder / "model.safetensors")
    return folder


def test_adapter_files_stay_as_long_as_others(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", keep=2, model=model)
    for version in (1, 2, 3):
        publisher.write_adapter(version, low().items(), {"r": 2, "lora_alpha": 2})
    names = sorted(path.name for path in publisher.directory.iterdir())
    assert names == ["weights-00000002.safetensors", "weights-00000003.safetensors"]


def test_adapter_settings_left_out_are_those_of_peft(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 6})
    held = read_verified(Merger(model, tmp_path / "merged", "float32").merge(manifest))
    assert torch.equal(held["a.weight"], torch.full((3, 4), 2 * 6 / 2.0))


def test_adapter_is_merged_anew_where_its_file_has_gone(model: Path, tmp_path: Path) -> None:
    publisher, merger = (
        WeightPublisher(tmp_path / "published", "shm", model=model),
        Merger(model, tmp_path / "m", "float32"),
    )
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 6})
    Path(merger.merge(manifest).place).unlink()
    assert torch.equal(read_verified(merger.merge(manifest))["a.weight"], torch.full((3, 4), 6.0))


@pytest.mark.parametrize("start", [True, False, None, "gaussian"])
def test_adapter_may_start_in_any_way_that_keeps_its_base(start: object) -> None:
    assert AdapterConfig.from_peft({"r": 8, "lora_alpha": 8, "init_lora_weights": start}).r == 8


def test_adapter_of_no_finite_scale_is_refused() -> None:
    with pytest.raises(BadAdapter, match="lora_alpha or a value of alpha_pattern is no number"):
        AdapterConfig.from_peft({"r": 8, "lora_alpha": float("inf")})


def test_adapter_of_a_model_that_changes_names_version_0(model: Path, tmp_path: Path) -> None:
    publisher, merger = (
        WeightPublisher(tmp_path / "published", "shm", model=model),
        Merger(model, tmp_path / "m", "float32"),
    )
    merger.merge(publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2}))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x7f")
    with pytest.raises(WeightsRefused, match=r"version 0: tensor 'a\.weight' has checksum"):
        merger.merge(publisher.write_adapter(2, low().items(), {"r": 2, "lora_alpha": 2}))


def test_adapter_without_tensors_or_settings_is_refused(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    with pytest.raises(BadAdapter, match="has no tensors"):
        publisher.write_adapter(1, [], {"r": 2, "lora_alpha": 2})
    settings: Any = ["r", "lora_alpha"]
    with pytest.raises(BadAdapter, match="settings are a list"):
        AdapterConfig.from_peft(settings)


def test_adapter_is_merged_into_floats_only(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    publisher = WeightPublisher(tmp_path / "published", "shm", model=tmp_path)
    with pytest.raises(BadAdapter, match=r"'a\.weight' of the model is int8"):
        publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2})


def test_adapter_of_a_model_that_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "published", "shm", model=model)
    manifest = publisher.write_adapter(1, low().items(), {"r": 2, "lora_alpha": 2})
    (model / "more.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsRefused, match=r"more\.safetensors cannot be read"):
        Merger(model, tmp_path / "merged", "float32").merge(manifest)
