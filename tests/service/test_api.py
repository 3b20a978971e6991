"""The API and the trainer of a service: order, repetition, refusals, and what one key sees of another's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from service_parts import IDS, NAME, Client, Service, forward_body, logprobs_of
from tests.small_disk import small_disk

from penstock.service import calls, routes
from penstock.service.calls import SILENT_S, SessionRecord
from penstock.trainer import Ranks

pytestmark = [pytest.mark.torch, pytest.mark.redis]


@pytest.fixture(scope="module")
def ranks():
    opened = Ranks.open(timeout_s=60)
    yield opened
    opened.close()


@pytest.fixture
async def client(service: Service, ranks: Ranks) -> Client:
    await service.start_trainer(ranks)
    return service.client()


async def test_the_client_is_told_that_the_head_has_no_adapter(client: Client) -> None:
    """The SDK logs this field; `train_unembed` is on by default, and changes nothing here."""
    assert "train_unembed" in (await client.post("create_session", tags=[]))["warning_message"]


async def test_requests_run_in_the_order_of_their_numbers_and_once(client: Client) -> None:
    model = await client.model()
    first = await client.result(await client.forward(model, 1, only=True))
    # The step arrives before the gradients that it needs, and these twice.
    step = await client.step(model, 3)
    gradients = await client.forward(model, 2)
    assert await client.forward(model, 2) == gradients
    assert (await client.result(step))["metrics"]["grad_norm"] > 0
    after = await client.result(await client.forward(model, 4, only=True))
    assert after.metrics["loss:sum"] < first.metrics["loss:sum"]
    assert await client.step(model, 3) == step
    again = await client.result(await client.forward(model, 5, only=True))
    np.testing.assert_array_equal(logprobs_of(again), logprobs_of(after))


async def test_a_number_with_another_request_is_refused(client: Client) -> None:
    model = await client.model()
    await client.result(await client.forward(model, 1))
    assert (await client.send_forward(forward_body(model, 1, ids=[1, 2, 3])))[0] == 422


async def test_losses_and_their_options_reach_the_trainer(client: Client) -> None:
    model = await client.model()
    q, advantages = np.full(5, -4.0), np.array([1.0, 0.0, -1.0, 0.5, 2.0])
    fields = {"logprobs": q, "advantages": advantages}
    numbers = iter(range(1, 9))
    for name, options in (
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ):
        request = await client.forward(model, next(numbers), loss=name, options=options, **fields)
        output = await client.result(request)
        ratio = np.exp(logprobs_of(output).astype(float) - q)
        near = np.clip(ratio, options.get("clip_low_threshold", 0), options.get("clip_high_threshold", np.inf))
        expected = -np.minimum(ratio * advantages, near * advantages).sum()
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "stable_reinforce"}, "loss_fn=importance_sampling"),
    ({"target_tokens": np.array([1.0] * 5)}, "target_tokens is not of dtype int64"),
    ({"weights": np.ones((1, 1, 5))}, "weights has shape"),
]


@pytest.mark.parametrize(("fields", "what"), REFUSED, ids=[what for _, what in REFUSED])
async def test_what_no_model_could_take_is_refused_at_once(client: Client, fields: dict[str, Any], what: str) -> None:
    model = await client.model()
    status, answer = await client.send_forward(forward_body(model, 1, **fields))
    assert status == 422
    assert what in answer["error"]["message"]


async def test_what_the_model_cannot_take_fails_and_the_next_request_runs(client: Client) -> None:
    model = await client.model()
    refused = [
        await client.forward(model, 1, ids=[1, 2, 99_999]),
        await client.forward(model, 2, weights=np.ones(4)),
        await client.forward(model, 3, loss="ppo"),
        await client.forward(model, 4, ids=[1] * 500),
        (
            await client.post(
                "load_weights", model_id=model, seq_id=5, path=f"tinker://{model}/weights/no", optimizer=True
            )
        )["request_id"],
    ]
    for request in refused:
        assert (await client.result(request))["category"] == "user"
    assert (await client.result(await client.forward(model, 6))).metrics["loss:sum"] > 0
    too_large = await client.post("create_session", tags=[])
    reply = await client.post(
        "create_model", session_id=too_large["session_id"], model_seq_id=0, base_model=NAME, lora_config={"rank": 9}
    )
    assert "rank 9" in (await client.result(reply["request_id"]))["error"]


async def test_malformed_bodies_are_refused_with_a_field(client: Client) -> None:
    model = await client.model()
    assert (await client.send_forward(b"\xff\xff not protobuf"))[0] == 422
    json_body = {"Content-Type": "application/json"}
    assert (await client.call("POST", "forward_backward", b"{}", **json_body))[0] == 415
    for path, body in (
        ("optim_step", {"model_id": model, "seq_id": 0, "adam_params": {}}),
        ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"beta1": 1.5}}),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "../outside"}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a/b"}),
        ("load_weights", {"model_id": model, "seq_id": 1, "path": "tinker://x/weights/../../etc", "optimizer": True}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "another"}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": NAME, "optimizer_config": {"type": "x"}}),
        ("asample", {"prompt": {"chunks": []}, "sampling_session_id": "s", "seq_id": 0}),
        ("asample", {"prompt": {"chunks": [{"type": "image", "data": ""}]}, "sampling_session_id": "s", "seq_id": 0}),
    ):
        status, answer = await client.call("POST", path, body)
        assert status == 422, (path, body, answer)
        assert answer["error"]["field"], (path, answer)


async def test_one_key_sees_nothing_of_another(service: Service, client: Client) -> None:
    model = await client.model()
    request = await client.forward(model, 1)
    saved = (await client.post("save_weights", model_id=model, seq_id=2, path="mine"))["request_id"]
    path = (await client.result(saved))["path"]
    bob = service.client("bob")
    bobs = await bob.model()
    for method, route, body in (
        ("POST", "retrieve_future", {"request_id": request}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
        ("POST", "weights_info", {"tinker_path": path}),
        ("GET", f"training_runs/{model}", None),
        ("GET", f"training_runs/{model}/checkpoints", None),
        ("DELETE", f"training_runs/{model}/checkpoints/weights/mine", None),
        ("GET", f"training_runs/{model}/checkpoints/weights/mine/external_weights_urls", None),
    ):
        assert (await bob.call(method, route, body))[0] == 404, route
    assert (await bob.send_forward(forward_body(model, 3)))[0] == 404
    load = await bob.post("load_weights", model_id=bobs, seq_id=1, path=path, optimizer=True)
    assert "no such checkpoint" in (await bob.result(load["request_id"]))["error"]
    for listing, key in (("training_runs", "training_runs"), ("checkpoints", "checkpoints"), ("sessions", "sessions")):
        _, theirs = await bob.call("GET", listing)
        assert model not in str(theirs[key])
        assert path not in str(theirs[key])
    bob._key = "tml-unknown-0123456789abcdef"
    assert (await bob.call("GET", "training_runs"))[0] == 401


async def test_checkpoints_are_listed_loaded_downloaded_and_removed(client: Client) -> None:
    model = await client.model()
    await client.forward(model, 1)
    await client.step(model, 2)
    path = f"tinker://{model}/weights/one"
    assert (await client.result(await _save(client, model, 3)))["path"] == path
    assert "overwrite" in (await client.result(await _save(client, model, 4)))["error"]
    assert (await client.result(await _save(client, model, 5, overwrite=True)))["path"] == path
    _, listed = await client.call("GET", f"training_runs/{model}/checkpoints")
    assert [one["tinker_path"] for one in listed["checkpoints"]] == [path]
    before = await client.result(await client.forward(model, 6, only=True))
    await client.step(model, 7)
    await client.forward(model, 8)
    await client.step(model, 9)
    load = await client.post("load_weights", model_id=model, seq_id=10, path=path, optimizer=True)
    assert (await client.result(load["request_id"]))["path"] == path
    after = await client.result(await client.forward(model, 11, only=True))
    np.testing.assert_array_equal(logprobs_of(before), logprobs_of(after))
    _, urls = await client.call("GET", f"training_runs/{model}/checkpoints/weights/one/external_weights_urls")
    for name, url in urls["urls"].items():
        async with client._session.get(url) as answer:
            assert answer.status == 200, name
        async with client._session.get(url.replace("/weights/one/", "/weights/two/")) as answer:
            assert answer.status == 404
    route = f"training_runs/{model}/checkpoints/weights/one"
    assert (await client.call("PUT", f"{route}/ttl", {"ttl_seconds": 3600}))[0] == 200
    assert (await client.call("DELETE", route))[0] == 200
    assert (await client.call("GET", f"{route}/external_weights_urls"))[0] == 404


async def test_a_full_disk_is_named_to_the_client_and_a_later_save_is_whole(service: Service, client: Client) -> None:
    model = await client.model()
    await client.forward(model, 1)
    await client.step(model, 2)
    with small_disk(service.folder / "checkpoints", 16) as disk:
        refused = await client.result(await _save(client, model, 3))
        assert "full" in refused["error"]
        assert refused["category"] == "server"
        assert [path for path in disk.rglob("*") if path.is_file()] == []
        assert (await client.call("GET", f"training_runs/{model}/checkpoints"))[1]["checkpoints"] == []
    assert (await client.result(await _save(client, model, 4)))["path"] == f"tinker://{model}/weights/one"


async def test_requests_wait_while_a_full_disk_takes_no_point(
    service: Service, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(service.folder / "points", 16):
        making = asyncio.create_task(client.model())
        async with asyncio.timeout(300):
            while "requests wait until a point is written" not in caplog.text:
                await asyncio.sleep(0.05)
        assert not making.done()
        assert (await client.call("GET", "healthz"))[0] == 200
    model = await making
    assert (await client.result(await client.forward(model, 1))).metrics["loss:sum"] > 0


async def _save(client: Client, model: str, number: int, **fields: Any) -> str:
    answer = await client.post("save_weights", model_id=model, seq_id=number, path="one", **fields)
    return str(answer["request_id"])


async def test_models_and_samplers_of_a_session_that_has_ended_are_removed(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FINISHED_S", -60.0)
    ended, other = await client.model(), await client.model()
    saved = await client.post("save_weights_for_sampler", model_id=ended, seq_id=1, sampling_session_seq_id=0)
    sampler = (await client.result(saved["request_id"]))["sampling_session_id"]
    of_base = {"session_id": ended.partition(":")[0], "sampling_session_seq_id": 1, "base_model": NAME}
    base_sampler = (await client.post("create_sampling_session", **of_base))["sampling_session_id"]
    await client.post(f"sessions/{ended.partition(':')[0]}/finish", reason={"type": "success"})
    assert (await client.call("POST", "session_heartbeat", {"session_id": ended.partition(":")[0]}))[0] == 410
    await service.runner._sweep()
    # Behind a gap it would wait for a request that can never come.
    for number in (2, 3):
        assert (await client.send_forward(forward_body(ended, number)))[0] == 410
    assert (await service.queue.requests.counts())["waiting"]["alice"] == 0
    for name in (sampler, base_sampler):
        assert (await client.call("GET", f"samplers/{name}"))[0] == 404
    assert not list((service.folder / "samplers").iterdir())
    assert (await client.result(await client.forward(other, 1))).metrics["loss:sum"] > 0


async def test_a_session_that_was_silent_for_a_day_does_not_come_back(service: Service) -> None:
    client = service.client()
    session = (await client.post("create_session", tags=[]))["session_id"]
    record = await SessionRecord.read(service.queue.requests, session)
    assert record is not None
    silent = record.model_copy(update={"seen": record.seen - SILENT_S - 1.0})
    await service.queue.requests.put(silent.record(session))
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    for path, sent in (("session_heartbeat", {"session_id": session}), ("create_sampling_session", body)):
        assert (await client.call("POST", path, sent))[0] == 410


async def test_a_heartbeat_does_not_take_back_the_end_of_its_session(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, requests = service.client(), service.context.requests
    session = (await client.post("create_session", tags=[]))["session_id"]
    read, has_read, go = requests.record, asyncio.Event(), asyncio.Event()

    async def slow_once(kind: str, name: str) -> str | None:
        text = await read(kind, name)
        if not has_read.is_set():
            has_read.set()
            await go.wait()
        return text

    monkeypatch.setattr(requests, "record", slow_once)
    beating = asyncio.create_task(client.call("POST", "session_heartbeat", {"session_id": session}))
    await has_read.wait()
    ending = asyncio.create_task(client.call("POST", f"sessions/{session}/finish", {}))
    await asyncio.wait({ending}, timeout=1.0)
    go.set()
    assert [(await one)[0] for one in (beating, ending)] == [200, 200]
    assert (await client.call("POST", "session_heartbeat", {"session_id": session}))[0] == 410


async def test_too_many_requests_are_refused_with_a_time(
    service: Service, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_WAITING", 2)
    await service.start_trainer(ranks)
    client = service.client()
    model = await client.model()
    await service.kill_trainer()
    waiting = [await client.forward(model, number) for number in (1, 2)]
    status, _ = await client.send_forward(forward_body(model, 3))
    assert status == 429
    await service.start_trainer(ranks)
    for request in waiting:
        await client.result(request)
    assert (await client.send_forward(forward_body(model, 3)))[0] == 200


async def test_a_poll_is_held_and_then_asked_again(service: Service, ranks: Ranks) -> None:
    await service.start_trainer(ranks)
    client = service.client()
    model = await client.model()
    await service.kill_trainer()
    object.__setattr__(service.context, "hold_s", 0.05)
    request = await client.forward(model, 1)
    status, answer = await client.call("POST", "retrieve_future", {"request_id": request})
    assert (status, answer["queue_state"]) == (408, "active")
    object.__setattr__(service.context, "hold_s", 30.0)
    poll = asyncio.create_task(client.result(request))
    await service.start_trainer(ranks)
    assert (await poll).metrics["loss:sum"] > 0


async def test_steps_of_other_models_make_no_point(service: Service, client: Client) -> None:
    """A point writes every model that has changed: counted together, eight models would each be written after a few of
    their own steps."""
    one, other = await client.model(), await client.model()

    async def point_after(model: str, number: int) -> int:
        """The newest point's position when the model's request before `number` is done."""
        await client.result(await client.forward(model, number, only=True))
        position: int = json.loads((service.folder / "points" / "index.json").read_text())["position"]
        return position

    for number in (1, 2):
        for model in (one, other):
            await client.step(model, number)
    assert await point_after(other, 3) == 2
    await client.step(one, 3)  # its third: `checkpoint_every`
    assert await point_after(one, 4) == 8


async def test_requests_without_any_step_leave_redis_by_their_bytes(service: Service, ranks: Ranks) -> None:
    service.log_bytes = 1000
    await service.start_trainer(ranks)
    client = service.client()
    model = await client.model()
    requests = [await client.forward(model, number, only=True) for number in (1, 2, 3)]
    for request in requests:
        await client.result(request)
    assert await service.queue.requests.request(requests[0]) is None
    assert (await client.result(await client.forward(model, 4))).metrics["loss:sum"] > 0


@pytest.mark.parametrize("killed_after", [0, 2, 5, 7])
async def test_a_trainer_that_is_killed_applies_every_request_once(
    service: Service, ranks: Ranks, killed_after: int
) -> None:
    """Killed after that many results, some of which no point holds; results that were seen stay as they are."""
    await service.start_trainer(ranks)
    client = service.client()
    model = await client.model()
    undisturbed = await client.model()

    async def train(name: str) -> list[Any]:
        results = []
        for number in range(1, 9, 2):
            ids = IDS[: 2 + number % 5]
            for request in (await client.forward(name, number, ids=ids), await client.step(name, number + 1)):
                results.append(await client.result(request))
                if name == model and len(results) == killed_after:
                    await service.restart_trainer(ranks)
        results.append(await client.result(await client.forward(name, 9, only=True)))
        return results

    mine, other = await train(model), await train(undisturbed)
    assert mine == other
