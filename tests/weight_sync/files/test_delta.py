"""Changed values only: bit-exact for any bits, small, refused by name where damaged, with a way back."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.weight_sync.conftest import reordered

from penstock.weight_sync import Manifest, WeightPublisher, WeightReader, WeightsRefused, read_verified
from penstock.weight_sync.files.delta import (
    BadDelta,
    Gaps,
    IndexCoder,
    PlannedChange,
    apply_change,
    decode_positions,
    words_of,
)

pytestmark = pytest.mark.torch
Tensors = dict[str, Any]


def tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(40, 30, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(20, 30, generator=generator).t(),
        "scalar": torch.tensor(float(seed)),
        "count": torch.arange(100) + seed,
        "flags": torch.rand(33, generator=generator) > 0.5,
        "empty": torch.empty(0, 4),
    }


def touched(before: Tensors, *places: int) -> Tensors:
    """A copy with other values of ``embed`` at `places`."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["embed"].view(-1)[list(places)] += 1
    return after


def equal(left: Tensors, right: Tensors) -> bool:
    """Bit by bit: NaN equals itself, and -0.0 is not 0.0."""
    return left.keys() == right.keys() and all(
        left[n].shape == right[n].shape and np.array_equal(words_of(left[n]), words_of(right[n])) for n in left
    )


def publish(folder: Path, versions: dict[int, Tensors], **settings: Any) -> list[dict[str, Any]]:
    publisher = WeightPublisher(folder, "shm", **{"keep": 8, "full_every": 8, **settings})
    return [publisher.write(version, given.items()) for version, given in versions.items()]


# the code ------------------------------------------------------------------------------------------------------------
def encode(positions: Any, size: int) -> tuple[Any, Any]:
    """The shortest code of `positions` in a tensor of `size` values, and the index."""
    costs = Gaps.of(positions).index_bytes(size)
    encoding = min(costs, key=lambda encoding: costs[encoding])
    index = IndexCoder(encoding, size).add(positions, size)
    assert index.nbytes == costs[encoding]
    return encoding, index


@given(st.data())
def test_any_places_come_back(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 7, 256, 70_000, 200_000]))
    chosen = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=60))
    stretch = data.draw(st.integers(0, min(size, 3_000)))
    positions = np.array(sorted(chosen | set(range(stretch))), dtype=np.int64)
    encoding, index = encode(positions, size)
    assert np.array_equal(decode_positions(encoding, index.view(np.uint8).data, positions.size, size), positions)
    assert index.nbytes <= min(4 * positions.size, -(-size // 8))


@pytest.mark.parametrize(
    ("places", "size", "encoding", "bytes_"),
    [
        ([0, 254, 600], 10_000, "gaps8", 4),  # the gap of 345 takes two bytes
        ([5, 100_000], 10_000_000, "gaps16", 6),
        ([5, 3_000_000_000], 4_000_000_000, "gaps32", 8),
        (list(range(0, 4000, 2)), 4000, "bitmap", 500),
        (list(range(0, 680, 8)), 720, "gaps8", 85),  # the bitmap takes 90
        ([600, 1200, 1800], 10_000, "gaps16", 6),  # gaps8 takes three bytes each
    ],
)
def test_the_shortest_code_is_taken(places: list[int], size: int, encoding: str, bytes_: int) -> None:
    found, index = encode(np.array(places), size)
    assert (found, index.nbytes) == (encoding, bytes_)
    if size < 1 << 24:
        assert decode_positions(found, index.view(np.uint8).data, len(places), size).tolist() == places


@given(st.data())
def test_the_cost_of_parts_is_that_of_the_whole(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([9, 300, 200_000, 1 << 33]))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=20))), dtype=np.int64)
    ends = sorted([*data.draw(st.lists(st.integers(0, size), max_size=3)), size])
    found, begin = Gaps(), 0
    for end in ends:
        part = positions[(positions >= begin) & (positions < end)]
        found, begin = found.followed_by(Gaps.of(part - begin).shifted(begin)), end
    assert found == Gaps.of(positions)


def test_zeros_of_either_sign_and_nans_are_values_like_others(tmp_path: Path) -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0] * 100)
    new = old.clone()
    new[0] = -0.0
    _, second, third = publish(tmp_path, {1: {"w": old}, 2: {"w": new}, 3: {"w": new}})
    tables = [json.loads(_header(Path(delta.place))["__metadata__"]["changes"]) for delta in (second, third)]
    assert [[entry[:4] for entry in table] for table in tables] == [[["w", "gaps8", 1, 4]], []]
    assert equal(read_verified(third), {"w": new})


@pytest.mark.parametrize(("changed", "encoding"), [(6, "bitmap"), (7, "whole")])
def test_places_that_save_nothing_are_left_out(changed: int, encoding: Any) -> None:
    """Of eight bytes: the bitmap takes one."""
    found = PlannedChange.of("w", Gaps.of(np.arange(changed)), 8, 1)
    expected = ("w", encoding, 0, 8) if encoding == "whole" else ("w", encoding, 1, changed)
    assert found == PlannedChange(*expected)
    assert PlannedChange.of("w", Gaps(), 8, 1) is None


@pytest.mark.parametrize(
    ("encoding", "index", "count", "message"),
    [
        ("gaps8", b"\x05\x06", 1, "2 places for 1 values"),
        ("gaps8", b"\x05\xff", 1, "does not end"),
        ("gaps8", b"\x64", 1, "place 100 in a tensor of 100 values"),
        ("gaps16", b"\x05", 1, "no whole number of gaps"),
        ("bitmap", b"\x01" * 12, 12, "a bitmap of 12 bytes for 100 values"),
        ("whole", b"", 3, "3 values, the tensor has 100"),
        ("whole", b"", 99.5, "199 bytes are no whole number of values"),
    ],
)
def test_an_index_that_cannot_be_is_refused_and_nothing_is_written(
    encoding: Any, index: bytes, count: float, message: str
) -> None:
    target = np.zeros(100, np.int16)
    with pytest.raises(BadDelta, match=message):
        apply_change(target, encoding, memoryview(index), memoryview(b"\x01" * int(2 * count)))
    assert not target.any()


# versions ------------------------------------------------------------------------------------------------------------
def test_a_delta_is_small_and_exact_and_what_is_mostly_different_ships_whole(tmp_path: Path) -> None:
    first = tensors(0)
    second = touched(first, 3, 700) | {"count": tensors(5)["count"]}
    full, delta = publish(tmp_path, {1: first, 2: second})
    assert (full.base_version, len(full.files), full.deltas_follow) == (None, 1, True)
    assert (delta.base_version, [file.version for file in delta.files]) == (1, [1, 2])
    table = {entry[0]: entry[1:4] for entry in json.loads(_header(Path(delta.place))["__metadata__"]["changes"])}
    assert table == {"embed": ["gaps8", 4, 4], "count": ["whole", 0, 800]}
    reader = WeightReader()
    assert equal(reader.read(full), first)
    assert equal(reader.read(delta), second)
    assert reader.bytes_read == full.bytes + delta.bytes
    assert equal(read_verified(delta), second)  # who joins late


def test_every_nth_is_full_and_without_it_all_are(tmp_path: Path) -> None:
    versions = {v: touched(tensors(), v) for v in range(1, 8)}
    bases = [m.base_version for m in publish(tmp_path / "a", versions, full_every=3)]
    assert bases == [None, 1, 2, None, 4, 5, None]
    always = publish(tmp_path / "b", versions, full_every=1)
    assert [m.base_version for m in always] == [None] * 7
    assert not any(m.deltas_follow for m in always)


def test_no_host_copy_is_kept_where_no_deltas_follow(tmp_path: Path) -> None:
    reader = WeightReader()
    received = reader.read(publish(tmp_path, {1: tensors()}, full_every=1)[0])
    assert received
    assert reader._base is None


def test_what_a_delta_cannot_say_ships_full(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", full_every=100)
    publisher.write(1, tensors(0).items())
    assert publisher.write(2, tensors(9).items()).base_version == 1  # the empty tensor and the flags save something
    assert publisher.write(2, tensors(0).items()).base_version is None, "the same number again"
    other = tensors(0) | {"embed": tensors(0)["embed"].float()}
    assert publisher.write(3, other.items()).base_version is None, "another dtype"
    assert publisher.write(4, {"all": torch.zeros(9)}.items()).base_version is None, "other tensors"
    assert publisher.write(5, {"all": torch.ones(9)}.items()).base_version is None, "all of it changed"


def test_the_trainer_may_change_in_place_what_it_gave(tmp_path: Path) -> None:
    live = tensors()
    publisher = WeightPublisher(tmp_path, "shm", full_every=9)
    reader = WeightReader()
    for version in range(1, 5):
        live["embed"].view(-1)[version] += 1
        assert equal(reader.read(publisher.write(version, live.items())), live)


def test_a_server_that_missed_links_applies_those_behind_what_it_holds(tmp_path: Path) -> None:
    versions = {v: touched(tensors(), *range(v)) for v in range(1, 7)}
    manifests = publish(tmp_path, versions)
    reader = WeightReader()
    reader.read(manifests[1])
    before = reader.bytes_read
    assert equal(reader.read(manifests[5]), versions[6])
    assert reader.bytes_read - before == sum(manifest.bytes for manifest in manifests[2:])


def test_a_chain_begun_anew_is_taken_from_its_full_version(tmp_path: Path) -> None:
    reader = WeightReader()
    old = publish(tmp_path / "before", {1: tensors(1), 2: touched(tensors(1), 4)})
    reader.read(old[-1])
    # The same numbers, other weights: a queue that lost its newest writes.
    again = {1: tensors(2), 2: touched(tensors(2), 7), 3: touched(tensors(2), 7, 8)}
    assert equal(reader.read(publish(tmp_path / "after", again)[-1]), again[3])


def test_a_link_that_is_gone_in_the_middle_does_not_matter_to_who_is_behind_it(tmp_path: Path) -> None:
    versions = {v: touched(tensors(), v) for v in range(1, 5)}
    manifests = publish(tmp_path, versions)
    reader = WeightReader()
    reader.read(manifests[2])
    Path(manifests[1].place).unlink()
    assert equal(reader.read(manifests[3]), versions[4])
    reader.forget()
    with pytest.raises(WeightsRefused, match=r"weights-00000002.delta.*No such file"):
        read_verified(manifests[3])


def test_files_stay_while_a_late_joiner_needs_them(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", full_every=3)
    present = []
    for version in range(1, 9):
        manifest = publisher.write(version, touched(tensors(), version).items())
        assert equal(read_verified(manifest), touched(tensors(), version))
        present.append(sorted(int(path.name[8:16]) for path in tmp_path.iterdir()))
    assert present == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [7, 8]]


def test_a_new_trainer_begins_with_a_full_version_and_leaves_the_announced_one(tmp_path: Path) -> None:
    manifests = publish(tmp_path, {v: touched(tensors(), v) for v in range(1, 4)}, keep=2)
    publisher = WeightPublisher(tmp_path, "shm", keep=2, full_every=8)
    assert equal(read_verified(manifests[-1]), touched(tensors(), 3))
    assert publisher.write(4, tensors().items()).base_version is None
    assert equal(read_verified(manifests[-1]), touched(tensors(), 3))
    publisher.write(3, touched(tensors(), 9).items())  # taken back: 4 goes, and so does the delta that was 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "weights-00000001.safetensors",
        "weights-00000002.delta.safetensors",
        "weights-00000003.safetensors",
    ]


# damage --------------------------------------------------------------------------------------------------------------


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw.replace(old, new)


def flip_last(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


FILE_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another byte": (flip_last, "the change of tensor 'embed' has checksum"),
    "a byte less": (lambda raw: raw[:-1], "bytes, the manifest says"),
    "a later format": (replaced(b'"delta/1"', b'"delta/2"'), "is in format 'delta/2', this server reads 'delta/1'"),
    "an unknown encoding": (replaced(b"gaps8", b"gapsX"), "unknown encoding"),
    "other bytes of the same meaning": (reordered, r"\.delta\.safetensors has checksum"),
}
PLAIN_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another checksum": (lambda plain: plain["tensors"][0].update(xxh3="0" * 16), "tensor 'count' has checksum"),
    "a tensor more": (
        lambda plain: plain["tensors"].append(plain["tensors"][0] | {"name": "lm_head"}),
        "tensor 'lm_head' is missing",
    ),
    "a tensor less": (lambda plain: plain["tensors"].pop(), "tensor 'flags' is not in the manifest"),
    "no chain": (lambda plain: plain.update(chain=[]), "the chain's file 2 is on 1"),
}


@pytest.mark.parametrize("damage", [*FILE_DAMAGE, *PLAIN_DAMAGE, "another name"])
def test_damage_is_refused_by_name_and_the_next_full_version_is_taken(tmp_path: Path, damage: str) -> None:
    second = touched(tensors(0), 3) | {"count": tensors(5)["count"]}
    full, delta, third = publish(tmp_path, {1: tensors(0), 2: second, 3: tensors(3)}, full_every=2)
    reader, path, plain = WeightReader(), Path(delta.place), delta.as_dict()
    reader.read(full)
    if damage in FILE_DAMAGE:
        change, message = FILE_DAMAGE[damage]
        path.write_bytes(change(path.read_bytes()))
    elif damage in PLAIN_DAMAGE:
        spoil, message = PLAIN_DAMAGE[damage]
        spoil(plain)
    else:  # as if the trainer had written it so
        message = "'ember', which the version before does not have"
        path.write_bytes(path.read_bytes().replace(b'\\"embed', b'\\"ember'))
        plain["xxh3"] = xxhash.xxh3_64_hexdigest(path.read_bytes())
    with pytest.raises(WeightsRefused, match=message):
        reader.read(Manifest.parse(plain))
    assert equal(reader.read(third), tensors(3))


def test_a_delta_on_other_weights_is_refused_by_its_file(tmp_path: Path) -> None:
    """The same numbers, of two lives of the trainer."""
    (base,) = publish(tmp_path / "a", {1: tensors(1)})
    delta = publish(tmp_path / "b", {1: tensors(2), 2: touched(tensors(2), 3)})[1]
    mixed = replace(delta, files=(base.files[0], delta.files[1]))
    with pytest.raises(
        WeightsRefused, match=r"weights-00000002\.delta.* changes other weights than those of version 1"
    ):
        WeightReader().read(mixed)


def test_what_is_held_is_not_taken_for_a_version_after_half_an_update(tmp_path: Path, caplog: Any) -> None:
    versions = {1: tensors(0), 2: touched(tensors(0), 3), 3: touched(tensors(0), 3, 4)}
    manifests = publish(tmp_path, versions)
    reader = WeightReader()
    reader.read(manifests[0])
    whole = Path(manifests[2].place).read_bytes()
    Path(manifests[2].place).write_bytes(flip_last(whole))
    with caplog.at_level(logging.WARNING), pytest.raises(WeightsRefused, match="'embed'"):
        reader.read(manifests[2])  # version 2 is applied by then, twice: to what was held, and to the full version
    assert "is read from its full version on" in caplog.text
    Path(manifests[2].place).write_bytes(whole)
    assert equal(reader.read(manifests[2]), versions[3])


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
        return header


# real updates --------------------------------------------------------------------------------------------------------
@pytest.mark.deep
def test_two_hundred_real_updates_are_exact_and_small(tmp_path: Path) -> None:
    """AdamW on float32 master weights of a small Qwen3, published in bfloat16 after every step."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    publisher, reader = WeightPublisher(tmp_path, "shm", full_every=50), WeightReader()
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for version in range(1, 201):
        ids = torch.randint(0, 512, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        published = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}
        manifest = publisher.write(version, published.items())
        assert equal(reader.read(manifest), published)
        sizes[manifest.base_version is None].append(manifest.bytes)
    assert len(sizes[True]) == 4
    assert max(sizes[False]) <= 0.10 * min(sizes[True])
