"""Draws follow the distribution that is asked for, and the record says so."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.rollout_server import Sampling
from penstock.rollout_server.engines.hf.sampling import ActiveRequest, LiveRequests, Record, Sampler

pytestmark = pytest.mark.torch
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])


def frequencies(sampling: Sampling, draws: int = 20_000) -> list[float]:
    record = Record(sampling, 1)
    for _ in range(draws // 500):
        Sampler(len(record.samples)).draw(LOGITS.expand(500, -1), [record] * 500)
    counts = torch.bincount(torch.tensor([token for token, _ in record.samples]), minlength=5)
    return (counts / draws).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).tolist()
    assert frequencies(Sampling(temperature=temperature)) == pytest.approx(expected, abs=0.015)


def test_top_k_and_top_p_cut_and_renormalise() -> None:
    two = [*LOGITS[:2].softmax(0).tolist(), 0, 0, 0]
    assert frequencies(Sampling(top_k=2)) == pytest.approx(two, abs=0.015)
    # 0.64 + 0.24 = 0.88 falls short of 0.9, so a third id is kept.
    three = [*LOGITS[:3].softmax(0).tolist(), 0, 0]
    assert frequencies(Sampling(top_p=0.9)) == pytest.approx(three, abs=0.015)
    assert frequencies(Sampling(top_k=2, top_p=0.5))[0] == 1.0


def test_rows_keep_their_own_settings_and_versions_are_cut_where_they_change() -> None:
    sampler = Sampler(0)
    greedy, seeded, same = (
        Record(Sampling(temperature=0.0), 3),
        Record(Sampling(seed=4), 3),
        Record(Sampling(seed=4), 3),
    )
    for step in range(6):
        sampler.version = 0 if step < 4 else 2
        ids = sampler.draw(LOGITS.expand(3, -1), [greedy, seeded, same])
        assert ids.tolist() == [record.samples[-1][0] for record in (greedy, seeded, same)]
    assert [token for token, _ in greedy.samples] == [0] * 6
    assert seeded.samples == same.samples
    assert greedy.cuts == [(0, 0), (4, 2)]
    expected = LOGITS.log_softmax(0)
    for token, logprob in (*greedy.samples, *seeded.samples):
        assert logprob == pytest.approx(float(expected[token]), abs=1e-6)


class OneRequest(LiveRequests[ActiveRequest]):
    def __init__(self, live: ActiveRequest) -> None:
        super().__init__(lambda: None)
        self._live["one"] = live


def test_an_end_that_comes_after_its_last_token_was_sent_brings_no_token_and_no_experts() -> None:
    record = Record(Sampling(), context_len=2, routed_from=0)
    record.routed.append(np.zeros((2, 1, 1), np.uint8))
    record.append(5, -0.5, version=3)
    live = ActiveRequest(record)
    requests = OneRequest(live)
    ((_, token),) = requests.collect()
    live.finish_reason = "length"
    ((_, end),) = requests.collect(only_ended=True)
    assert (token.token_ids, len(token.routed_experts), token.finish_reason) == ([5], 1, None)
    assert (end.token_ids, end.routed_experts, end.finish_reason) == ([], [], "length")
    assert requests.in_flight == 0
