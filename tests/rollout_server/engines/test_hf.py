"""What is particular to the hf engine: its KV cache over a swap, its prefixes, its memory, its death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import VOCAB, Reference, ask, running, small_config, whole

import penstock
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf import HFEngine
from penstock.rollout_server.protocol import Chunk, EngineError, Generation, WeightsRefused

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
PROMPT = [(7 * i + 3) % VOCAB for i in range(100)]
TOLERANCE = 2e-5


@asynccontextmanager
async def hf_engine(model: str, logs: Path, **changes: Any) -> AsyncIterator[HFEngine]:
    engine = HFEngine(small_config(**changes), model, logs, 0)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def seen(event: asyncio.Event) -> Callable[[Chunk], None]:
    return lambda chunk: event.set() if chunk.token_ids else None


async def swap_in_the_middle(engine: HFEngine, reference: Reference) -> tuple[Generation, Generation]:
    """One answer over a swap from version 0 to 1; one to the same prompt, begun after it while the first still runs."""
    begun = asyncio.Event()
    over = asyncio.create_task(whole(engine, ask(PROMPT, 400), seen(begun)))
    await begun.wait()
    await engine.load_weights(reference.publish(1, reference.other(1)))
    after = await whole(engine, ask(PROMPT, 20))
    return await over, after


async def test_keep_goes_on_with_the_old_kv_and_the_new_weights(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    async with hf_engine(tiny_model, tmp_path) as engine:
        over, after = await swap_in_the_middle(engine, reference)
    assert [version for version, _, _ in over.version_spans] == [0, 1]
    swap = over.version_spans[1][1]
    assert over.logprobs[swap:] == pytest.approx(mixed_logprobs(reference, over.token_ids, swap), abs=TOLERANCE)
    # The running request's blocks hold KV of version 0 for this very prompt: the new one must not get them.
    assert after.version_spans == [(1, 0, 20)]
    assert after.logprobs == pytest.approx(reference.logprobs(PROMPT, after.token_ids), abs=TOLERANCE)


def mixed_logprobs(reference: Reference, sampled: list[int], swap: int) -> list[float]:
    """Of sampled[swap:], the KV of all that was fed before the swap being the old weights'. Leaves the new in use."""
    torch = reference.torch
    fed, rest = PROMPT + sampled[: swap - 1], sampled[swap - 1 :]
    with torch.no_grad():
        cache = reference.model(torch.tensor([fed]), use_cache=True).past_key_values
        reference.use(reference.other(1))
        logits = reference.model(torch.tensor([rest]), past_key_values=cache).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(rest[1:]).unsqueeze(1)).squeeze(1).tolist()


async def test_recompute_goes_on_as_if_the_new_weights_had_always_been(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    async with hf_engine(tiny_model, tmp_path, pause="recompute") as engine:
        over, after = await swap_in_the_middle(engine, reference)
    assert [version for version, _, _ in over.version_spans] == [0, 1]
    assert len(over.token_ids) == 400
    swap = over.version_spans[1][1]
    old = reference.logprobs(PROMPT, over.token_ids)[:swap]
    assert over.logprobs[:swap] == pytest.approx(old, abs=TOLERANCE)
    reference.use(reference.other(1))
    new = reference.logprobs(PROMPT, over.token_ids)[swap:]
    assert over.logprobs[swap:] == pytest.approx(new, abs=TOLERANCE)
    assert after.logprobs == pytest.approx(reference.logprobs(PROMPT, after.token_ids), abs=TOLERANCE)


async def test_more_requests_than_the_cache_holds_are_put_back_and_stay_exact(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    async with hf_engine(tiny_model, tmp_path, kv_cache_tokens=1024) as engine:
        answers = await asyncio.gather(*[whole(engine, ask(PROMPT[i:], 200)) for i in range(12)])
    for i, answer in enumerate(answers):
        assert len(answer.token_ids) == 200
        assert answer.logprobs == pytest.approx(reference.logprobs(PROMPT[i:], answer.token_ids), abs=TOLERANCE)


async def test_abandoned_requests_free_their_kv_even_when_the_cache_was_full(tiny_model: str, tmp_path: Path) -> None:
    async with hf_engine(tiny_model, tmp_path, kv_cache_tokens=1024) as engine:
        tasks = [asyncio.create_task(whole(engine, ask(PROMPT[i:], 400))) for i in range(12)]
        await asyncio.sleep(0.4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5):
            while (figures := await engine.ping())["kv_blocks"] or figures["in_flight"]:
                await asyncio.sleep(0.02)
            assert len((await whole(engine, ask(PROMPT, 30))).token_ids) == 30


async def test_updates_one_after_another_under_load(tiny_model: str, tmp_path: Path, reference: Reference) -> None:
    async with hf_engine(tiny_model, tmp_path) as engine:
        tasks = [asyncio.create_task(whole(engine, ask(PROMPT[i:], 400))) for i in range(8)]
        for version in range(1, 7):
            await engine.load_weights(reference.publish(version, reference.other(version)))
        for answer in await asyncio.gather(*tasks):
            versions = [version for version, _, _ in answer.version_spans]
            assert versions == sorted(set(versions))
            assert len(answer.token_ids) == 400
        assert (await engine.ping())["version"] == 6


async def test_an_engine_lives_on_changes_and_takes_a_full_version_where_one_is_damaged(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    from penstock.rollout_server.weights import WeightPublisher

    reference.publisher = WeightPublisher(tmp_path / "deltas", "shm", keep=8, full_every=4)
    tensors = {name: tensor.clone() for name, tensor in reference.first.items()}
    async with hf_engine(tiny_model, tmp_path) as engine:
        for version in range(1, 7):
            tensors["model.embed_tokens.weight"][version::97] += 0.3
            manifest = reference.publish(version, tensors)
            assert manifest["base_version"] == (version - 1 if version % 4 != 1 else None)
            if version == 3:
                Path(manifest["path"]).write_bytes(b"damaged")
                with pytest.raises(WeightsRefused, match="has 7 bytes"):
                    await engine.load_weights(manifest)
            elif version == 4:  # its chain leads through the damaged one
                with pytest.raises(WeightsRefused, match="weights-00000003"):
                    await engine.load_weights(manifest)
            else:
                await engine.load_weights(manifest)
                reference.use(tensors)
                answer = await whole(engine, ask(PROMPT, 8, temperature=0.0))
                assert answer.version_spans == [(version, 0, 8)]
                assert answer.token_ids == reference.greedy(PROMPT, 8)


async def test_bfloat16_takes_float32_weights(tiny_model: str, tmp_path: Path, reference: Reference) -> None:
    async with hf_engine(tiny_model, tmp_path, dtype="bfloat16") as engine:
        before = await whole(engine, ask(PROMPT, 8, temperature=0.0))
        await engine.load_weights(reference.publish(1, reference.other(1)))
        await engine.load_weights(reference.publish(2, reference.first))
        assert (await whole(engine, ask(PROMPT, 8, temperature=0.0))).token_ids == before.token_ids


async def test_tied_tensors_may_come_under_every_name_if_they_agree(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    embed = reference.other(1)["model.embed_tokens.weight"]
    async with hf_engine(tiny_model, tmp_path) as engine:
        both = {**reference.other(1), "lm_head.weight": embed}
        assert (await engine.load_weights(reference.publish(1, both))).version == 1
        torn = {**both, "lm_head.weight": embed + 1}
        with pytest.raises(Exception, match=r"lm_head.weight.*tied but differ"):
            await engine.load_weights(reference.publish(2, torn))


async def test_a_model_that_is_not_there_is_named_at_start(tmp_path: Path) -> None:
    engine = HFEngine(small_config(), str(tmp_path / "nothing"), tmp_path, 0)
    with pytest.raises(EngineError, match="nothing"):
        await engine.start()
    assert engine.process is not None
    assert engine.process.returncode is not None


async def test_a_cache_too_small_for_one_request_is_said_at_start(tiny_model: str, tmp_path: Path) -> None:
    engine = HFEngine(RolloutConfig(max_model_len=1024, kv_cache_tokens=512), tiny_model, tmp_path, 0)
    with pytest.raises(EngineError, match=r"rollout.kv_cache_tokens is 512"):
        await engine.start()


@pytest.mark.crash
async def test_a_killed_engine_fails_its_requests_at_once(tiny_model: str, tmp_path: Path) -> None:
    async with hf_engine(tiny_model, tmp_path) as engine:
        async with aclosing(engine.generate(ask(PROMPT, 400))) as chunks:
            await anext(chunks)
            assert engine.process is not None
            os.kill(engine.process.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="gone") as caught:
                async for _ in chunks:
                    pass
        assert caught.value.retryable
        assert not await engine.healthy()


@pytest.mark.crash
def test_the_engine_dies_with_its_owner(tiny_model: str, tmp_path: Path) -> None:
    root = str(Path(penstock.__file__).parent.parent)
    command = [sys.executable, str(Path(__file__).with_name("hf_owner.py")), tiny_model, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        time.sleep(0.3)
        assert running(pid)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 5
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)
