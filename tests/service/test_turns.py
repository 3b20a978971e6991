"""Turns of the owners of samples at the places of the servers."""

from __future__ import annotations

from penstock.service.calls import Prompt, Sample, TextChunk
from penstock.service.sampler import Waiting, in_turns
from penstock.transfer_queue import ClientRequest

CALL = Sample(prompt=Prompt(chunks=[TextChunk(tokens=[1])]), sampling_session_id="s", seq_id=0)


def sample(name: str) -> Waiting:
    """`name`: the owner's letter and a number."""
    return name, ClientRequest(name[0], "sample", b"", "sampler:s", int(name[1:]), ordered=False), CALL


def test_a_place_goes_to_the_owner_who_has_the_fewest() -> None:
    waiting = [sample(name) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    assert [name for name, _, _ in in_turns(waiting, ["a", "a", "c"])] == ["b1", "c1", "b2", "a1", "a2", "a3"]
