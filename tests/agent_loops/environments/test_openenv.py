"""Environments on a server: the protocol as a server of a few lines speaks it, with everything that goes wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import WSMsgType, web
from tests.agent_loops.environments.conftest import Play
from tests.agent_loops.loops.conftest import check_fed

from penstock.transfer_queue import Outcome, OutcomeKind

TEXT = {"type": "string"}


@dataclass
class Served:
    """What the server was asked, and how it answers."""

    url: str = ""
    resets: list[dict[str, Any]] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=lambda: {"metadata": {"type": "object"}, "message": TEXT})
    refuses: int = 0
    """So many connections more are told that there is no room."""
    open: int = 0
    step: Callable[[Any], Awaitable[Any]] | None = None
    reset: Callable[[], Any] | None = None


def observation(text: str, reward: Any = None, done: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, **more}, "reward": reward, "done": done}}


def error(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "words", "code": code}}


async def usual_step(action: Any) -> dict[str, Any]:
    return observation(f"heard {action['message']}", 1.0, action["message"] == "stop", length=len(action["message"]))


@asynccontextmanager
async def serving(served: Served) -> AsyncIterator[Served]:
    async def connection(request: web.Request) -> web.WebSocketResponse:
        wire = web.WebSocketResponse()
        await wire.prepare(request)
        if served.refuses:
            served.refuses -= 1
            await wire.send_json(error("CAPACITY_REACHED"))
            await wire.close()
            return wire
        served.open += 1
        try:
            async for message in wire:
                if message.type is not WSMsgType.TEXT or not await answer(wire, json.loads(message.data)):
                    break
        finally:
            served.open -= 1
        return wire

    async def answer(wire: web.WebSocketResponse, asked: dict[str, Any]) -> bool:
        if asked["type"] == "close":
            return False
        if asked["type"] == "reset":
            served.resets.append(asked["data"])
            found = served.reset() if served.reset else observation("begin")
        else:
            served.actions.append(asked["data"])
            found = await (served.step or usual_step)(asked["data"])
        if found is None:
            return False
        await wire.send_str(found if isinstance(found, str) else json.dumps(found))
        return True

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": served.fields}})

    app = web.Application()
    app.add_routes([web.get("/ws", connection), web.get("/schema", schema)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, bound).start()
    served.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    async with AsyncExitStack() as stack:

        async def start(**given: Any) -> Served:
            return await stack.enter_async_context(serving(Served(**given)))

        yield start


async def test_an_episode_on_a_server(play: Play, serve, chat_for) -> None:
    served = await serve()
    given = {"url": served.url, "options": {"size": 3}, "observation_field": "text", "show": ["length"]}
    played = await play("openenv", ["go", "stop"], given, {"seed": 11})
    assert served.resets == [{"seed": 11, "episode_id": "train/00000000#0", "size": 3}]
    assert served.actions == [{"message": "go"}, {"message": "stop"}]
    done = played.done
    assert (done.reward, done.turn_rewards, done.outcome.kind) == (2.0, (1.0, 1.0), OutcomeKind.COMPLETED)
    assert done.metrics["env/length"] == 4.0
    assert "heard go\nlength: 2" in chat_for().decode(played.prompts[1])
    check_fed(played.client, done)
    assert served.open == 0


async def test_a_server_without_room_is_asked_again(play: Play, serve) -> None:
    served = await serve(refuses=2)
    played = await play("openenv", ["stop"], {"url": served.url})
    assert (played.outcome.kind, served.refuses) == (OutcomeKind.COMPLETED, 0)


async def test_a_server_that_stays_full_is_a_failure_with_its_deadline(play: Play, serve) -> None:
    served = await serve(refuses=1000)
    played = await play("openenv", ["stop"], {"url": served.url, "start_timeout_s": 1.0})
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    assert "start_timeout_s" in played.outcome.reason


async def test_no_server_is_a_failure_that_names_it(play: Play) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    played = await play("openenv", ["stop"], {"url": f"http://127.0.0.1:{port}", "start_timeout_s": 1.0})
    assert played.outcome.kind == OutcomeKind.INFRA_ERROR
    assert str(port) in played.outcome.reason


async def never() -> Any:
    await asyncio.Event().wait()


async def gives(answer: Any) -> Any:
    return answer


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (lambda _: never(), "step_timeout_s"),
        (lambda _: gives(error("EXECUTION_ERROR")), "words (EXECUTION_ERROR)"),
        (lambda _: gives(None), "closed"),
        (lambda _: gives('{"type": "picture"}'), "picture"),
        (lambda _: gives(observation("x", "much")), "much"),
    ],
)
async def test_a_step_that_fails_is_a_typed_failure(play: Play, serve, step: Any, named: str) -> None:
    served = await serve(step=step)
    limit_s = 2.0 if named == "step_timeout_s" else 60.0
    played = await play("openenv", ["go"], {"url": served.url, "step_timeout_s": limit_s})
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    assert named in played.outcome.reason
    assert played.trajectory is None


async def test_a_reset_that_fails_is_a_typed_failure(play: Play, serve) -> None:
    served = await serve(reset=lambda: error("EXECUTION_ERROR"))
    played = await play("openenv", ["go"], {"url": served.url}, {"seed": 5})
    assert (played.outcome.kind, played.outcome.component) == (OutcomeKind.INFRA_ERROR, "environment")
    assert "seed 5" in played.outcome.reason


async def test_an_action_that_the_server_refuses_is_answered(play: Play, serve) -> None:
    async def strict(action: Any) -> Any:
        return error("VALIDATION_ERROR") if action["message"] == "bad" else await usual_step(action)

    served = await serve(step=strict)
    played = await play("openenv", ["bad", "stop"], {"url": served.url})
    assert (played.done.turn_rewards, played.done.metrics["env/invalid_turns"]) == ((0.0, 1.0), 1.0)


async def test_fields_are_found_or_named(play: Play, serve) -> None:
    two = await serve(
        fields={"message": TEXT, "language": {"anyOf": [TEXT, {"type": "null"}]}, "count": {"type": "integer"}}
    )
    asked = await play("openenv", ["stop"], {"url": two.url})
    assert asked.outcome.kind == OutcomeKind.INFRA_ERROR
    assert "message, language" in asked.outcome.reason
    named = await play("openenv", ["stop"], {"url": two.url, "action_field": "message"})
    assert named.outcome == Outcome(OutcomeKind.COMPLETED)
    wrong = await play("openenv", ["stop"], {"url": two.url, "action_field": "message", "observation_field": "board"})
    assert "observation_field 'board': the observation has text" in wrong.outcome.reason


async def test_an_episode_that_is_cut_leaves_no_connection(play: Play, serve) -> None:
    served = await serve()
    played = await play("openenv", ["go"], {"url": served.url}, max_turns=2)
    assert played.outcome == Outcome(OutcomeKind.TRUNCATED, "turns")
    assert served.open == 0
