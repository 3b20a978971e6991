"""KV over a swap, on the batcher itself: here the swap can be put between two chosen tokens."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.rollout_server.conftest import Reference, small_config
from transformers import AutoModelForCausalLM

from penstock.rollout_server import Chunk, Sampling
from penstock.rollout_server.engines.hf.attention import NAME
from penstock.rollout_server.engines.hf.batch import Batcher
from penstock.rollout_server.engines.hf.cache import PAGE_TOKENS
from penstock.rollout_server.engines.hf.sampling import Record

pytestmark = [pytest.mark.torch]


class Bench:
    """A batcher in this process, and its answers."""

    def __init__(self, model_path: str, pause: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=NAME)
        self.batcher = Batcher(self.model, small_config(pause=pause), 0, lambda: None, step_tokens=256)
        self.chunks: defaultdict[str, list[Chunk]] = defaultdict(list)

    def swap(self, reference: Reference, seed: int) -> None:
        def load() -> None:
            for name, tensor in reference.other(seed).items():
                self.model.get_parameter(name).data.copy_(tensor)

        self.batcher.swap(load, seed)

    async def answer(self, name: str) -> tuple[list[int], list[float]]:
        async with asyncio.timeout(60):
            while not self.chunks[name] or self.chunks[name][-1].finish_reason is None:
                for found, chunk in self.batcher.collect():
                    assert isinstance(chunk, Chunk)
                    self.chunks[found].append(chunk)
                await asyncio.sleep(0.005)
        chunks = self.chunks.pop(name)
        return [i for chunk in chunks for i in chunk.token_ids], [p for chunk in chunks for p in chunk.logprobs]


@pytest.fixture(params=["keep", "recompute"])
def bench(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tiny_model, request.param)
    yield made
    made.batcher.stop()


def hold_for_a_swap(batcher: Batcher, tokens: int) -> None:
    """The pass that samples this token of the first request does not end before a swap waits for it."""
    draw = batcher.sampler.draw

    def held(logits: torch.Tensor, records: list[Record]) -> torch.Tensor:
        if len(records[0].samples) == tokens and batcher.sampler.version == 0:  # the swap has not been yet
            batcher.sampler.draw = draw  # type: ignore[method-assign]
            deadline = time.monotonic() + 60
            while not batcher._swaps_waiting and time.monotonic() < deadline:
                time.sleep(0.001)
        return draw(logits, records)

    batcher.sampler.draw = held  # type: ignore[method-assign]


async def test_a_block_that_was_half_full_at_the_swap_is_nobodys_prefix(bench: Bench, reference: Reference) -> None:
    """It fills up after the swap, half old and half new: a prompt with the same tokens must not be given it."""
    hold_for_a_swap(bench.batcher, tokens=5)
    bench.batcher.add("over", [5, 6, 7], Sampling(max_new_tokens=120))
    record = bench.batcher._live["over"].record
    while not record.samples:
        await asyncio.sleep(0)
    await asyncio.to_thread(bench.swap, reference, 1)
    sampled, _ = await bench.answer("over")
    assert 0 < 3 + record.cuts[1][0] < PAGE_TOKENS
    context = [5, 6, 7, *sampled[:100]]
    bench.batcher.add("after", context, Sampling(max_new_tokens=20))
    ids, logprobs = await bench.answer("after")
    reference.use(reference.other(1))
    assert logprobs == pytest.approx(reference.logprobs(context, ids), abs=2e-5)


async def test_a_prompt_of_many_requests_is_computed_once(bench: Bench, reference: Reference) -> None:
    """All asked for before the first is through; one that is cancelled meanwhile holds nobody up."""
    prompt = [(11 * i + 5) % 512 for i in range(3 * PAGE_TOKENS + 5)]
    names = [f"{i}" for i in range(6)]
    for name in names:
        bench.batcher.add(name, prompt, Sampling(max_new_tokens=4))
    bench.batcher.cancel("0")
    bench.batcher.cancel("4")
    answers = {name: await bench.answer(name) for name in names if name not in {"0", "4"}}
    assert bench.batcher.reused_tokens >= 3 * 3 * PAGE_TOKENS
    for ids, logprobs in answers.values():
        assert len(ids) == 4
        assert logprobs == pytest.approx(reference.logprobs(prompt, ids), abs=2e-5)
