"""Packs: whole rows, within the budget, positions from 0, predictors one before their targets."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.trainer import ModelLimits, Pack, make_row, pack_rows
from penstock.trainer.batch import Row, number_tokens
from penstock.trainer.packing import empty_pack, join_rows, split_by_budget, split_by_length

pytestmark = pytest.mark.torch


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(50, 250))
def test_every_row_is_in_one_pack_and_only_single_rows_pass_the_budget(lengths: list[int], budget: int) -> None:
    packs = split_by_budget(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[i] for i in pack) <= budget for pack in packs)


def test_falling_length_first_fit_by_hand() -> None:
    assert split_by_budget([30, 70, 50, 20, 40], 100) == [[1, 0], [2, 4], [3]]


def test_rows_of_one_length_fill_the_budget() -> None:
    """Lines times the longest of them: 2 · 5, 2 · 4, 1 · 2."""
    assert split_by_length([3, 5, 2, 5, 4], 10) == [[1, 3], [4, 0], [2]]
    assert split_by_length([], 10) == []


def test_the_layout_of_a_pack() -> None:
    from trainer_support import make_segment

    rng = np.random.default_rng(0)
    segments = [make_segment(rng, 0, prompt=2, response=6), make_segment(rng, 0, prompt=3, response=6)]
    limits = ModelLimits(context=16, vocab=64)
    rows = [make_row(5 + n, s, "", step=1, bound=2, model=limits) for n, s in enumerate(segments)]
    pack = join_rows(rows)
    assert pack.row_bounds.tolist() == [0, 8, 17]
    assert pack.positions.tolist() == [*range(8), *range(9)]
    assert pack.predictors.tolist() == [1, 2, 4, 5, 6, 10, 11, 13, 14, 15]
    assert pack.targets.tolist() == pack.ids[pack.predictors + 1].tolist()
    assert pack.episode.tolist() == [5] * 5 + [6] * 5
    assert pack.staleness.tolist() == [1] * 10
    assert pack.token.tolist() == [*range(5), *range(5)]
    assert join_rows(number_tokens(rows)).token.tolist() == [*range(10)]
    assert len(pack_rows(rows, budget=10)) == 2


def test_an_empty_pack_has_a_token_to_run_and_none_to_train() -> None:
    pack = empty_pack()
    lengths = {part.name: len(value) for part in fields(pack) if (value := getattr(pack, part.name)) is not None}
    of_the_run = {"ids": 1, "positions": 1, "row_bounds": 2, "run_lengths": 1}
    assert lengths == dict.fromkeys(lengths, 0) | of_the_run


def row(episode: int, prompt: list[int], sampled: list[int]) -> Row:
    ids = np.array([*prompt, *sampled])
    targets = np.arange(len(prompt), len(ids))
    zeros = np.zeros(len(sampled), dtype=np.int64)
    on = np.ones(len(sampled), dtype=np.bool_)
    return Row(episode, ids, targets, zeros.astype(np.float32), zeros, on, on, zeros)


def seen_by(pack: Pack, place: int) -> list[int]:
    """The ids that the model has read when it is at `place`, by way of the runs' forks."""
    bounds = pack.row_bounds.tolist()
    run = next(r for r in range(len(bounds) - 1) if bounds[r] <= place < bounds[r + 1])
    before = [] if pack.forks is None or pack.forks[run] < 0 else seen_by(pack, int(pack.forks[run]))
    return [*before, *pack.ids[bounds[run] : place + 1].tolist()]


def test_rows_share_what_they_begin_with() -> None:
    """Row 3 shares a prefix that ends in row 0's sampled tokens, row 2 its prompt, row 1 nothing."""
    rows = [row(0, [1, 2, 3], [4, 5]), row(1, [9], [8, 8, 8]), row(2, [1, 2, 3], [6]), row(3, [1, 2, 3], [4, 7])]
    (pack,) = pack_rows(rows, 100, share=True)
    assert pack.ids.tolist() == [1, 2, 3, 6, 4, 7, 5, 9, 8, 8, 8]
    assert pack.positions.tolist() == [0, 1, 2, 3, 3, 4, 4, 0, 1, 2, 3]
    assert pack.row_bounds.tolist() == [0, 4, 6, 7, 11]
    assert pack.forks is not None
    assert pack.forks.tolist() == [-1, 2, 4, -1]
    assert pack.targets.tolist() == [6, 4, 7, 4, 5, 8, 8, 8]
    assert pack.predictors.tolist() == [2, 2, 4, 2, 4, 7, 8, 9]
    assert pack.episode.tolist() == [2, 3, 3, 0, 0, 1, 1, 1]
    assert pack.segment.tolist() == [0, 1, 1, 2, 2, 3, 3, 3]


def test_a_beginning_is_shared_from_a_tenth_of_the_row_on() -> None:
    tenth, less = ([row(n, [1], [2 + n] * count) for n in range(2)] for count in (9, 10))
    assert [pack_rows(rows, 100, share=True)[0].forks is None for rows in (tenth, less)] == [False, True]


@pytest.mark.parametrize("prompt", [7, 9])
def test_a_prompt_as_long_as_the_budget_leaves_rows_alone(prompt: int) -> None:
    rows = [row(n, [1] * prompt, [4 - n]) for n in range(3)]
    packs = pack_rows(rows, 8, share=True)
    assert [(len(pack.ids), pack.episode.tolist()) for pack in packs] == [(prompt + 1, [n]) for n in range(3)]


def test_copies_of_shared_keys_count_to_the_budget() -> None:
    """Each row repeats 64 tokens, whose keys take the memory of two more."""
    rows = [row(n, [1] * 64, [2 + n]) for n in range(5)]
    assert [len(pack_rows(rows, 65 + room, share=True)) for room in (11, 12)] == [2, 1]


def test_a_pack_leaves_its_images_on_the_host() -> None:
    seen = replace(row(0, [1, 2], [3]), images=(b"red", b"blue"), teacher=np.zeros(1, dtype=np.float32))
    moved = join_rows([seen, row(1, [4], [5])]).to(torch.device("meta"))
    devices = {
        part.name: str(value.device) for part in fields(moved) if (value := getattr(moved, part.name)) is not None
    }
    host = {"image_bytes", "image_bounds", "shown", "run_lengths"}
    assert {name for name, device in devices.items() if device == "cpu"} == host
    assert {name for name, device in devices.items() if device == "meta"} == {*devices} - host
    assert (moved.proximal, moved.experts) == (None, None)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.lists(st.integers(1, 50), min_size=1, max_size=20))),
    st.integers(8, 120),
)
def test_every_target_is_predicted_from_its_own_row(parts: list[tuple[int, int, list[int]]], budget: int) -> None:
    """However rows share and are split: each sampled token once, after exactly the ids that stand before it."""
    rows = [row(n, [kind] * length, sampled) for n, (kind, length, sampled) in enumerate(parts)]
    packs = pack_rows(rows, budget, share=True)
    found = []
    for pack in packs:
        alone = pack.forks is None and len(pack.row_bounds) == 2
        assert len(pack.ids) <= max(budget, *(len(one.ids) for one in rows))
        assert len(pack.ids) <= budget or alone or len(pack.row_bounds) - 1 == 1 + int((pack.forks >= 0).sum())
        for episode, place, target in zip(pack.episode.tolist(), pack.predictors.tolist(), pack.targets, strict=True):
            context = seen_by(pack, place)
            assert int(pack.positions[place]) == len(context) - 1
            found.append((episode, (*context, int(target))))
    expected = [(n, tuple(r.ids[: t + 1].tolist())) for n, r in enumerate(rows) for t in r.targets.tolist()]
    assert sorted(found) == sorted(expected)


def test_a_pack_goes_to_a_gpu_from_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory ends when the GPU has done all that it was given before."""
    pinned: list[int] = []
    copied: list[tuple[bool, bool]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copied.append((id(tensor) in pinned, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    pack = empty_pack()
    pack.to(torch.device("cpu"))
    assert set(copied) == {(False, False)}
    copied.clear()
    pack.to(torch.device("cuda"))
    assert set(copied) == {(True, True)}
