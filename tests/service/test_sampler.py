"""Samples of the service's clients, with the servers and the trainer's models left out."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from service_parts import CONFIG, NAME, Client, Service

from penstock.common import write_atomically
from penstock.rollout_server import RolloutConfig
from penstock.service import ServiceJob, sampler
from penstock.service.calls import CheckpointRecord, LoraSettings, SamplerRecord, SessionRecord
from penstock.service.job import outcome_of
from penstock.service.messages import SampledTokens
from penstock.service.sampler import SampleRunner
from penstock.transfer_queue import RunContext

pytestmark = [pytest.mark.redis, pytest.mark.torch]


@asynccontextmanager
async def sample_runner(service: Service, model: str, **models: Callable[..., Any]) -> AsyncIterator[SampleRunner]:
    """A runner whose trainer has the methods `models`."""
    run = RunContext(queue=service.queue, model=model, token=secrets.token_hex(16))
    job = ServiceJob(run, CONFIG, RolloutConfig(), service.folder, NAME)
    trainer: Any = SimpleNamespace(**models)
    in_torch: Any = asyncio.to_thread
    async with SampleRunner(job, trainer, service.queue.requests, in_torch) as runner:
        yield runner


async def ask(client: Client, sampler: str, number: int = 0, **fields: Any) -> str:
    sample = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_session_id": sampler, "seq_id": number}
    return str((await client.post("asample", **sample, **fields))["request_id"])


async def base_sampler(client: Client) -> str:
    session = (await client.post("create_session", tags=[]))["session_id"]
    reply = await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=NAME)
    return str(reply["sampling_session_id"])


async def sampled(runner: SampleRunner) -> None:
    """All open samples have a result."""
    await runner._look()
    runner._start()
    await asyncio.wait(runner._tasks)


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("CUDA out of memory")


async def test_a_sample_whose_prompt_cannot_be_scored_fails_and_is_not_waited_for(
    service: Service, tiny_model: str
) -> None:
    client = service.client()
    async with sample_runner(service, tiny_model, score=out_of_memory) as runner:
        request = await ask(client, await base_sampler(client), prompt_logprobs=True)
        await sampled(runner)
    result = await service.queue.requests.result(request)
    assert result is not None, "its client waits"
    assert outcome_of(result) == "server"
    assert b"RuntimeError" in result.data


def write_served(folder: Path, target: Path) -> Any:
    """As `ClientModels` does, of tensors that are not read."""
    content = (folder / "adapter_model.safetensors").read_bytes()
    target.mkdir(exist_ok=True)
    return SimpleNamespace(path=Path(mkdtemp(dir=target)), sha256=hashlib.sha256(content).hexdigest())


async def test_an_adapter_that_was_saved_again_under_its_name_is_another(service: Service, tiny_model: str) -> None:
    file = service.folder / "one" / "adapter_model.safetensors"
    file.parent.mkdir()
    async with sample_runner(service, tiny_model, write_served=write_served) as runner:
        refs = []
        for content in ("old", "old", "new"):
            if not file.exists() or file.read_text() != content:
                write_atomically(file, content)
            async with runner._adapter("one") as ref:
                refs.append(ref)
        assert (refs[0] == refs[1], refs[1] == refs[2]) == (True, False)
        file.unlink()
        async with runner._adapter("one") as ref:
            assert ref == refs[2], "what was deleted is sampled from as long as the servers have it"


async def test_folders_for_the_servers_are_removed_when_nobody_samples_from_them(
    service: Service, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "SERVED", 2)
    async with sample_runner(service, tiny_model, write_served=write_served) as runner, AsyncExitStack() as stack:
        for number in range(5):
            (service.folder / str(number)).mkdir()
            (service.folder / str(number) / "adapter_model.safetensors").write_text(str(number))
        used = await stack.enter_async_context(runner._adapter("0"))
        for number in range(1, 5):
            async with runner._adapter(str(number)):
                pass
        assert used is not None
        assert Path(used.folder).exists()
        assert len(list((service.folder / "served").iterdir())) == 2


async def test_a_checkpoint_that_cannot_be_read_fails_its_samples_alone(service: Service, tiny_model: str) -> None:
    client = service.client()
    async with sample_runner(service, tiny_model, write_served=write_served) as runner:
        session = await base_sampler(client)
        record = (await SamplerRecord.read_all(service.queue.requests))[session]
        await service.queue.requests.put(record.model_copy(update={"folder": "gone"}).record(session))
        request = await ask(client, session)
        await sampled(runner)
    result = await service.queue.requests.result(request)
    assert result is not None
    assert outcome_of(result) == "server"
    assert b"No such file" in result.data


async def test_a_session_of_weights_that_were_saved_over_samples_no_others(
    service: Service, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client()
    session = (await client.post("create_session", tags=[]))["session_id"]
    checkpoint = CheckpointRecord(
        owner=(await SessionRecord.read_all(service.queue.requests))[session].owner,
        run_id=f"{session}:train:0",
        kind="sampler_weights",
        name="latest",
        bytes=1,
        created=1.0,
        lora=LoraSettings(),
        base_model=NAME,
    )
    path = str(checkpoint.path)
    await service.queue.requests.put(checkpoint.record(path))
    words = {"session_id": session, "model_path": path}
    old = (await client.post("create_sampling_session", **words, sampling_session_seq_id=0))["sampling_session_id"]
    async with sample_runner(service, tiny_model, write_served=write_served) as runner:
        monkeypatch.setattr(runner, "_sequence", AsyncMock(return_value=SampledTokens([1], [0.0], stopped=True)))
        monkeypatch.setattr(runner, "_written", AsyncMock(return_value=SimpleNamespace(ref=None, users=0)))
        before = await ask(client, old)
        await sampled(runner)
        again = checkpoint.model_copy(update={"created": 2.0})
        await service.queue.requests.put(again.record(path))
        new = (await client.post("create_sampling_session", **words, sampling_session_seq_id=1))["sampling_session_id"]
        after, newer = await ask(client, old, number=1), await ask(client, new)
        await sampled(runner)
    results = [await service.queue.requests.result(request) for request in (before, after, newer)]
    assert [result and outcome_of(result) for result in results] == ["done", "user", "done"]
    assert results[1] is not None
    assert b"was saved again after this session began" in results[1].data
