"""What is particular to the hf engine: its KV cache over a swap, its prefixes, its memory, its death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conformance.subject import sets
from tests.rollout_server.conftest import VOCAB, Reference, ask, small_config, whole

from penstock.rollout_server import EngineError, RolloutConfig
from penstock.rollout_server.engines.hf.engine import HFEngine

pytestmark = [pytest.mark.torch]
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


async def test_hf_gets_no_secret_of_the_run(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_TOKEN", "PENSTOCK_REDIS_PASSWORD"):
        monkeypatch.setenv(name, "run-token")
    async with hf_engine(tiny_model, tmp_path) as engine:
        assert b"run-token" not in Path(f"/proc/{engine.child.pid}/environ").read_bytes()


async def test_keep_goes_on_with_the_old_kv_and_the_new_weights(
    tiny_model: str, tmp_path: Path, reference: Reference
) -> None:
    async with hf_engine(tiny_model, tmp_path) as engine:
        for new in range(1, 17, 2):  # on a busy machine an answer may be whole before the weights are there
            begun, manifest = asyncio.Event(), reference.publish(new, reference.other(1))
            answer = asyncio.create_task(whole(engine, ask(PROMPT, 400), sets(begun)))
            await begun.wait()
            await engine.load_weights(manifest)
            after = await whole(engine, ask(PROMPT, 20))
            over = await answer
            if len(over.version_spans) > 1:
                break
            await engine.load_weights(reference.publish(new + 1, reference.first))
    assert [version for version, _, _ in over.version_spans] == [new - 1, new]
    swap = over.version_spans[1][1]
    assert over.logprobs[swap:] == pytest.approx(mixed_logprobs(reference, over.token_ids, swap), abs=TOLERANCE)
    # The running request's blocks hold KV of the version before for this very prompt: the new one must not get them.
    assert after.version_spans == [(new, 0, 20)]
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
        steps = (await engine.ping())["steps"]
        async with asyncio.timeout(60):
            while (figures := await engine.ping())["kv_blocks"] or figures["in_flight"]:
                await asyncio.sleep(0.02)
            assert figures["steps"] < steps + 100, "they were sampled to their ends"
            assert len((await whole(engine, ask(PROMPT, 30))).token_ids) == 30


async def test_bfloat16_takes_float32_weights(tiny_model: str, tmp_path: Path, reference: Reference) -> None:
    async with hf_engine(tiny_model, tmp_path, dtype="bfloat16") as engine:
        before = await whole(engine, ask(PROMPT, 8, temperature=0.0))
        await engine.load_weights(reference.publish(1, reference.other(1)))
        await engine.load_weights(reference.publish(2, reference.first))
        assert (await whole(engine, ask(PROMPT, 8, temperature=0.0))).token_ids == before.token_ids


async def test_work_that_fails_ends_the_engine_and_names_the_cause(tiny_model: str, tmp_path: Path) -> None:
    """Its memory may hold half of a version."""
    async with hf_engine(tiny_model, tmp_path) as engine:
        with pytest.raises(EngineError, match=r"(?s)gone.*sleep failed.*exit status 3") as lost:
            await engine.child.call("sleep", 60.0)
        assert lost.value.retryable
        assert not engine.alive


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
