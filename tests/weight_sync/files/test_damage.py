"""Files of another form than expected: each is refused by name, and none ends the process that reads it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.weight_sync.conftest import altered, file_of, open_files, parts_of

torch = pytest.importorskip("torch")


from penstock.weight_sync import (
    Manifest,
    WeightPublisher,
    WeightReader,
    WeightsRefused,
    open_published,
    read_verified,
)
from penstock.weight_sync.files.file_format import PartialFile
from penstock.weight_sync.files.file_reader import FileReader

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


def test_damaged_file_is_refused_without_staying_open(tmp_path: Path, own_records: Path) -> None:
    """A server meets the same one at every pull, for as long as it is announced."""
    manifest = WeightPublisher(tmp_path, "shm").write(1, {"m": torch.rand(2, 3)}.items())
    own = manifest.files[-1]
    others = [replace(own, bytes=own.bytes + 1), replace(own, place=str(tmp_path)), replace(own, xxh3="0" * 16)]
    before = open_files(tmp_path, own_records)
    for file in others:
        with pytest.raises(WeightsRefused):
            read_verified(replace(manifest, files=(file,)))
    assert open_files(tmp_path, own_records) == before


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
