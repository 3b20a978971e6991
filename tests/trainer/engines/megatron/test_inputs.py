"""Layouts of a pack: every token has one place, fill-up is behind it, context ranks share each row out evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from penstock.trainer import Pack
from penstock.trainer.batch import Row
from penstock.trainer.engines.megatron.inputs import cut_rows, rectangle
from penstock.trainer.packing import empty_pack, join_rows

pytestmark = pytest.mark.torch


def pack_of(lengths: list[int]) -> Pack:
    """Every token has an id of its own; from the second on each row's are sampled."""
    rows, first = [], 1
    for length in lengths:
        ids, targets = np.arange(first, first + length), np.arange(1, length)
        nothing = np.zeros(len(targets), dtype=np.int64)
        mask = np.ones(len(targets), dtype=np.bool_)
        rows.append(Row(0, ids, targets, nothing.astype(np.float32), nothing, mask, mask, nothing))
        first += length
    return join_rows(rows)


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


def test_an_empty_pack_has_a_layout() -> None:
    inputs = rectangle(empty_pack(), 2)
    assert inputs.arguments["input_ids"].tolist() == [[0, 0]]
    assert len(inputs.own) == len(inputs.line) == len(inputs.column) == 0
