"""Announcements of another form than expected are refused, whatever is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.weight_sync import Manifest, WeightsRefused

TENSOR = {"name": "a", "shape": [2], "dtype": "float32", "xxh3": "9f"}
GOOD = {"version": 1, "transport": "shm", "path": "/x", "bytes": 3, "xxh3": "ab", "tensors": [TENSOR]}
FILE = {"version": 0, "base_version": None, "place": "/y", "bytes": 3, "xxh3": "ab", "state": "cd"}


def test_good_manifest_is_read() -> None:
    assert Manifest.parse(GOOD | {"chain": [FILE], "base_version": 0}).version == 1


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_manifest_is_announced_as_it_was_read(transport: str) -> None:
    chain = [FILE, FILE | {"version": 1, "base_version": 0}]
    place = {"url": "http://t/w"} if transport == "broadcast" else {"path": "/x"}
    others = {"base_version": 1, "deltas_follow": True, "adapter": {"config": {"r": 2}, "base": "ef"}, "round": "u/n-1"}
    plain = GOOD | {"version": 2, "transport": transport, "chain": chain} | place | others
    assert Manifest.parse(plain).as_dict() == {key: plain[key] for key in plain if key != "path" or "path" in place}


def test_manifest_promises_no_deltas_unless_it_says_so() -> None:
    read = Manifest.parse(GOOD)
    assert (read.deltas_follow, read.adapter, read.broadcast) == (False, None, "")
    assert Manifest("shm", read.files, read.tensors) == read


@pytest.mark.parametrize(
    "announced",
    [
        None,
        3,
        [],
        GOOD | {"transport": []},
        GOOD | {"tensors": None},
        GOOD | {"tensors": [3]},
        GOOD | {"tensors": [TENSOR | {"name": 3}]},
        GOOD | {"tensors": [TENSOR | {"shape": ["x"]}]},
        GOOD | {"version": "1"},
        GOOD | {"version": True},
        GOOD | {"bytes": "3"},
        GOOD | {"path": None},
        GOOD | {"xxh3": 3},
        GOOD | {"chain": 3},
        GOOD | {"chain": [FILE | {"bytes": "x"}], "base_version": 0},
        GOOD | {"adapter": None},
        GOOD | {"adapter": {"config": 3, "base": "x"}},
        GOOD | {"adapter": {"config": {}, "base": 3}},
        GOOD | {"chain": [FILE], "base_version": 0.0},
    ],
)
def test_malformed_manifest_is_refused(announced: Any) -> None:
    with pytest.raises(WeightsRefused):
        Manifest.parse(announced)


@pytest.mark.parametrize("name", ["version", "transport", "path", "bytes", "tensors"])
def test_manifest_without_a_field_is_refused_by_it(name: str) -> None:
    with pytest.raises(WeightsRefused, match=f"no field '{name}'"):
        Manifest.parse({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize("name", list(TENSOR))
def test_entry_without_a_field_is_refused_by_it(name: str) -> None:
    tensor = {key: value for key, value in TENSOR.items() if key != name}
    with pytest.raises(WeightsRefused, match=f"entry .* has no field '{name}'"):
        Manifest.parse(GOOD | {"tensors": [tensor]})
