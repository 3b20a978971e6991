"""The fake client: a stream says what the whole answer says."""

from __future__ import annotations

import pytest

from penstock.rollout_server import GenerateRequest, Sampling
from penstock.testing import FakeClient


@pytest.mark.parametrize(("most", "reason"), [(9, "stop"), (3, "length")])
async def test_a_stream_is_the_answer_in_pieces(most: int, reason: str) -> None:
    client = FakeClient(lambda context: [*context, 7], version=2)
    request = GenerateRequest(token_ids=[1, 2, 3], sampling=Sampling(max_new_tokens=most))
    chunks = [chunk async for chunk in client.stream(request)]
    whole = await client.generate(request)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert all(chunk.version_spans == [(2, 0, 1)] for chunk in chunks)
    assert client.requests == [request, request]


async def test_an_empty_answer_still_ends() -> None:
    chunks = [chunk async for chunk in FakeClient(lambda _: []).stream(GenerateRequest(token_ids=[1]))]
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [([], "stop")]
