"""Blocks of rows, and which layers of a model have experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout_server import encode_rows, mixture_layers, without_last
from penstock.rollout_server.routed_experts import decode_rows, rows_between


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 12), st.sampled_from([np.uint8, np.uint16]))
def test_blocks_are_joined_and_cut_at_their_end(sizes: list[int], count: int, kind: type) -> None:
    rows = np.arange(sum(sizes) * 6).astype(kind).reshape(-1, 3, 2)
    blocks = [encode_rows(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    found = decode_rows(blocks)
    assert found is not None
    assert found.dtype == kind
    np.testing.assert_array_equal(found, rows)
    cut = decode_rows(without_last(blocks, count))
    np.testing.assert_array_equal(rows[:0] if cut is None else cut, rows[: max(0, len(rows) - count)])


def test_rows_that_blocks_lack_are_unknown() -> None:
    rows = np.arange(1, 13, dtype=np.uint8).reshape(3, 2, 2)
    found = rows_between([encode_rows(rows)], 10, 5)
    assert found is not None
    np.testing.assert_array_equal(found, np.concatenate([np.zeros((2, 2, 2)), rows]))
    assert rows_between([], 10, 5) is None


@pytest.mark.parametrize(
    "block", ["?", "AAAA", encode_rows(np.zeros((2, 2), np.uint8)), encode_rows(np.zeros((1, 1, 2)))]
)
def test_what_is_no_block_is_refused(block: str) -> None:
    with pytest.raises(ValueError, match="routed_experts"):
        decode_rows([block])


MIXTURE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (MIXTURE, (0, 1, 2, 3)),
        ({**MIXTURE, "mlp_only_layers": [1]}, (0, 2, 3)),
        ({**MIXTURE, "decoder_sparse_step": 2}, (1, 3)),
        ({**MIXTURE, "first_k_dense_replace": 3}, (3,)),
        ({**MIXTURE, "moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({**MIXTURE, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, (1, 2, 3)),
        ({"text_config": MIXTURE}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts_by_settings(config: dict, layers: tuple[int, ...]) -> None:
    assert mixture_layers(config).with_experts == layers


@pytest.mark.parametrize(
    ("change", "cause"),
    [({"num_experts": 0}, "experts"), ({"num_experts_per_tok": 1}, "1 experts"), ({"vision_config": {}}, "pictures")],
)
def test_a_model_whose_experts_cannot_be_recorded_is_refused(change: dict, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        mixture_layers({**MIXTURE, **change})
