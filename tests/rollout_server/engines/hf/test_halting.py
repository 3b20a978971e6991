"""Both batchers stand still, sleep and continue at once; the decoding thread is woken by news alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.rollout_server.conftest import small_config
from tests.until import until
from tests.vision_model import save_vision_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.rollout_server import Sampling
from penstock.rollout_server.engines.hf.attention import NAME
from penstock.rollout_server.engines.hf.batch import Batcher
from penstock.rollout_server.engines.hf.sampling import HaltingRequests
from penstock.rollout_server.engines.hf.vision import VisionBatcher

pytestmark = pytest.mark.torch
WHOLE = (3, "length")


@pytest.fixture(params=["text", "images"])
def batcher(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setattr("penstock.rollout_server.engines.hf.sampling.IDLE_S", 3600.0)
    made: HaltingRequests[Any, Any]
    if request.param == "text":
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation=NAME)
        made = Batcher(model, small_config(), 0, lambda: None)
    else:
        path = save_vision_model(tmp_path)
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)
        made = VisionBatcher(model, path, small_config(), 0, lambda: None)
    yield made
    made._stopping = True
    made._news.set()
    made._thread.join(60)


async def outcome(batcher: Any, name: str, count: int = 3) -> tuple[int, str]:
    """(tokens, finish reason) of an answer to a new request, or to the one of this name."""
    if name not in batcher._live:
        batcher.add(name, [5, 6, 7], Sampling(max_new_tokens=count))
    tokens = 0
    async with asyncio.timeout(60):
        while True:
            for _, chunk in batcher.collect():
                tokens += len(chunk.token_ids)
                if chunk.finish_reason:
                    return tokens, chunk.finish_reason
            await asyncio.sleep(0.01)


async def test_requests_wait_while_it_stands_still_and_are_turned_away_while_it_sleeps(batcher: Any) -> None:
    assert await outcome(batcher, "first") == WHOLE
    for continues in (batcher.go_on, lambda: batcher.swap(lambda: None, 1)):
        await asyncio.to_thread(batcher.halt)
        batcher.add("waits", [5, 6, 7], Sampling(max_new_tokens=3))
        await asyncio.sleep(0.2)
        assert (batcher.collect(), batcher.stands_still) == ([], True)
        await asyncio.to_thread(continues)
        assert await outcome(batcher, "waits") == WHOLE
    draw = batcher.sampler.draw

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return draw(*arguments)

    batcher.sampler.draw = slow
    batcher.add("long", [5, 6, 7], Sampling(max_new_tokens=1000))
    await until(lambda: bool(batcher._live["long"].record.samples))
    await asyncio.to_thread(batcher.sleep)
    tokens, reason = await outcome(batcher, "long")
    assert (0 < tokens < 1000, reason) == (True, "abort")
    assert await outcome(batcher, "new") == (0, "abort")
    assert batcher.cache_bytes[0] == 0
    batcher.wake()
    assert await outcome(batcher, "awake") == WHOLE
