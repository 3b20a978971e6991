"""Rows and prefixes of the hf engine's cache, requests beside a damaged one, and models that it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from random import Random

from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.hf.test_attention import sample, trainer_logprobs
from tests.tiny_model import save_poisoned_model, save_tiny_model
from transformers import AutoModelForCausalLM

from penstock.rollout_server import Sampling
from penstock.rollout_server.engines.hf.attention import NAME, UnsupportedArguments
from penstock.rollout_server.engines.hf.batch import Batcher
from penstock.rollout_server.engines.hf.cache import KVCache, Layout, Row
from penstock.rollout_server.engines.hf.sampling import Record

pytestmark = [pytest.mark.torch]
LIMIT, LONGEST = 1024, 256
KV, DIM = 2, 3


class Filled:
    """A cache whose values are made from the tokens before and at each place, as a model's are."""

    def __init__(self) -> None:
        shape = torch.Size([1, KV, 1, DIM])
        self.cache = KVCache(Layout({0: (shape, shape), 1: (shape, shape)}, torch.float32), LIMIT, LONGEST)
        self.rows: list[Row] = []

    def start(self, ids: list[int]) -> None:
        row = Row(Record(Sampling(), len(ids)), ids=ids)
        if self.cache.start(row):
            self.rows.append(row)

    def feed(self, row: Row, count: int) -> None:
        end = min(row.fed + count, len(row.ids))
        if row.bucket is not None and end > row.bucket.capacity and not self.cache.grow(row, end, self.make_way(row)):
            self.rows.remove(row)
            return
        assert row.bucket is not None
        for plane in row.bucket.planes[0]:
            plane[row.index, row.fed : end] = held_by(row.ids)[row.fed : end]
        row.fed = end

    def make_way(self, row: Row) -> Any:
        def drop_newest() -> bool:
            newest = self.rows[-1]
            if newest is not row:
                self.end(newest)
            return newest is not row

        return drop_newest

    def end(self, row: Row) -> None:
        self.cache.drop(row)
        self.rows.remove(row)

    def check(self) -> None:
        """Every row holds what its own tokens give and nothing behind it; the limit holds."""
        held = 0
        for bucket in self.cache._buckets.values():
            held += bucket.planes[0].shape[1] * bucket.capacity
            assert [row.index for row in bucket.rows] == list(range(len(bucket.rows)))
            for row in bucket.rows:
                for plane in bucket.planes[0]:
                    assert torch.equal(plane[row.index, : row.fed], held_by(row.ids)[: row.fed])
                    assert not plane[row.index, row.fed :].any()
        held += sum(len(prefix.ids) for prefix in self.cache._prefixes.values())
        assert held <= LIMIT


def held_by(ids: list[int]) -> Any:
    """[len(ids), KV, DIM]"""
    sums = torch.tensor(ids, dtype=torch.float32).cumsum(0) + 1
    return sums.view(-1, 1, 1) * torch.arange(1, KV * DIM + 1).view(1, KV, DIM)


@pytest.mark.parametrize("seed", range(6))
def test_rows_hold_their_own_tokens_through_any_order_of_calls(seed: int) -> None:
    random, filled = Random(seed), Filled()
    stems = [[random.randrange(9) for _ in range(LONGEST)] for _ in range(3)]
    for _ in range(400):
        row = random.choice(filled.rows) if filled.rows else None
        match random.randrange(6):
            case 0 | 1:
                shared = random.randrange(100)
                tail = [random.randrange(9) for _ in range(random.randrange(1, LONGEST - shared))]
                filled.start([*random.choice(stems)[:shared], *tail])
            case 2 | 3 if row:
                filled.feed(row, random.randrange(1, 80))
            case 4 if row:
                filled.cache.keep_prefix(row)
            case 5 if row:
                filled.end(row)
            case 5 if random.random() < 0.1:
                filled.cache.forget_prefixes()
        filled.check()
    assert filled.cache.reused_tokens > 0


def test_prefixes_of_other_weights_are_neither_kept_nor_found() -> None:
    filled, ids = Filled(), list(range(40))
    filled.start(ids)
    (row,) = filled.rows
    filled.feed(row, 40)
    filled.cache.keep_prefix(row)
    filled.cache.forget_prefixes()
    filled.cache.keep_prefix(row)
    filled.start(ids)
    assert filled.rows[1].fed == 0
    assert filled.cache.reused_tokens == 0


async def test_a_request_whose_values_are_no_numbers_damages_no_other(tmp_path: Path) -> None:
    path = save_poisoned_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)
    prompts = {"damaged": [7] * 40, "short": [5], "sound": [7 * i % 5 for i in range(30)]}
    # The short one is in the row that the damaged one leaves.
    answers = await sample(model, prompts, 8)
    assert all(math.isnan(logprob) for logprob in answers["damaged"][1])
    for name in ("short", "sound"):
        ids, logprobs = answers[name]
        if 7 in ids:
            ids, logprobs = ids[: ids.index(7) + 1], logprobs[: ids.index(7) + 1]
        assert logprobs == pytest.approx(trainer_logprobs(path, prompts[name], ids), abs=5e-5)


@pytest.mark.parametrize("kind", ["Mamba", "Lfm2", "GptOss"])
def test_models_with_other_layers_are_refused(tmp_path: Path, kind: str) -> None:
    path = save_tiny_model(tmp_path, kind, **CHANGES.get(kind, {}))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with pytest.raises(UnsupportedArguments, match=r"rollout\.engine"):
        Batcher(model, small_config(), 0, lambda: None)


CHANGES: dict[str, dict[str, Any]] = {"Lfm2": {"layer_types": ["conv", "full_attention"]}}
