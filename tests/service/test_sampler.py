"""Samples of the service's clients, with the servers and the trainer's models left out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from service_parts import CONFIG, NAME, Client, Service

from penstock.common import write_atomically
from penstock.rollout_server import RolloutConfig
from penstock.service import ServiceJob, sampler
from penstock.service.calls import CheckpointRecord, LoraSettings, SessionRecord
from penstock.service.job import outcome_of
from penstock.service.sampler import SampleRunner
from penstock.testing import fake_manifest
from penstock.transfer_queue import RunContext, ServerInfo

pytestmark = [pytest.mark.redis, pytest.mark.torch]


@asynccontextmanager
async def sample_runner(service: Service, model: str, **models: Callable[..., Any]) -> AsyncIterator[SampleRunner]:
    """A runner whose trainer has the methods `models`."""
    run = RunContext(queue=service.queue, model=model, token=secrets.token_hex(16))
    job = ServiceJob(run, CONFIG, RolloutConfig(), service.folder, service.folder / "weights", NAME)
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


def out_of_memory(*_: Any) -> None:
    raise RuntimeError("CUDA out of memory")


async def test_a_sample_whose_prompt_cannot_be_scored_fails_and_is_not_waited_for(
    service: Service, tiny_model: str
) -> None:
    client = service.client()
    async with sample_runner(service, tiny_model, score=out_of_memory) as runner:
        request = await ask(client, await base_sampler(client), prompt_logprobs=True)
        runner._mounted = None
        await runner._look()
        await runner._serve(None)
        await asyncio.wait(runner._tasks)
    result = await service.queue.requests.result(request)
    assert result is not None, "its client waits"
    assert outcome_of(result) == "server"
    assert b"RuntimeError" in result.data


async def test_an_adapter_that_was_saved_again_under_its_name_is_given_to_the_servers_again(
    service: Service, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = service.folder / "one" / "adapter_model.safetensors"
    file.parent.mkdir()
    async with sample_runner(service, tiny_model, peft_of=lambda _: ({}, {})) as runner:
        monkeypatch.setattr(runner._files, "write_adapter", lambda version, *_: fake_manifest_of(version))
        for content, version in (("old", 1), ("old", 1), ("new", 2)):
            if not file.exists() or file.read_text() != content:
                write_atomically(file, content)
            await service.queue.heartbeat(ServerInfo("up", "http://127.0.0.1:9", version))
            await service.queue.heartbeat(ServerInfo("restarting", "http://127.0.0.1:9", 0, accepting=False))
            runner._waiting["one"] = []
            await runner._serve("one")
            assert runner._version == version
        file.unlink()
        runner._waiting["one"] = []
        await runner._serve("one")
        assert runner._version == 2, "what was deleted is sampled from as long as the servers have it"


async def test_a_session_of_weights_that_were_saved_over_samples_no_others(service: Service, tiny_model: str) -> None:
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
    async with sample_runner(service, tiny_model) as runner:
        before = await ask(client, old)
        await runner._look()
        again = checkpoint.model_copy(update={"created": 2.0})
        await service.queue.requests.put(again.record(path))
        new = (await client.post("create_sampling_session", **words, sampling_session_seq_id=1))["sampling_session_id"]
        after, newer = await ask(client, old, number=1), await ask(client, new)
        await runner._look()
        (waiting,) = runner._waiting.values()
    assert [request_id for request_id, _, _ in waiting] == [before, newer]
    refused = await service.queue.requests.result(after)
    assert refused is not None
    assert b"was saved again after this session began" in refused.data


async def test_servers_that_do_not_load_an_adapter_are_named_in_the_result(
    service: Service, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MOUNT_S", 0.0)
    client = service.client()
    async with sample_runner(service, tiny_model, peft_of=lambda _: ({}, {})) as runner:
        monkeypatch.setattr(runner._files, "write_adapter", lambda version, *_: fake_manifest_of(version))
        await service.queue.heartbeat(ServerInfo("slow", "http://127.0.0.1:9", 0))
        request = await ask(client, await base_sampler(client))
        await runner._look()
        await runner._serve(None)
    result = await service.queue.requests.result(request)
    assert result is not None
    assert b"not loaded by slow within" in result.data


def fake_manifest_of(version: int) -> Any:
    return SimpleNamespace(as_dict=lambda: fake_manifest(version))
