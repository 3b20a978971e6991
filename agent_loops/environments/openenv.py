"""`agent.loop: openenv`: an environment on an OpenEnv server, one websocket per episode.

    worker ──ws /ws──► server: an environment of this connection's own

    {"type": "reset", "data": {"seed": 7, "episode_id": "…"}}    {"type": "step", "data": ACTION}    {"type": "close"}

answered ``{"type": "observation", "data": {"observation", "reward", "done"}}``, or ``{"type": "error", "data": …}``
with a message and a code. Actions are objects: the answer's text is put into one of their fields, found in the server's
``/schema``. The protocol is that of openenv 0.10, spoken without its package, which needs some hundred others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import aiohttp

from penstock.agent_loops.environments.loop import EnvironmentLoop, within
from penstock.agent_loops.environments.protocol import COMPONENT, Environment, EnvStep, InvalidAction, StepFailed
from penstock.agent_loops.environments.settings import EnvironmentSettings, OpenEnvSettings
from penstock.agent_loops.environments.shapes import MAX_OBSERVATION_CHARS
from penstock.agent_loops.errors import InfraFailure
from penstock.common import Backoff
from penstock.transfer_queue import Task

CLOSE_DEADLINE_S = 3.0
BACKOFF = Backoff(0.2, 5.0)


class OpenEnvLoop(EnvironmentLoop):
    """Runs the environment at `agent.settings.url` (`OpenEnvSettings`)."""

    settings_kind: ClassVar[type[EnvironmentSettings]] = OpenEnvSettings
    settings: OpenEnvSettings

    async def open(self, task: Task, options: dict[str, Any]) -> Environment:
        url = self.settings.url.rstrip("/")
        server: OpenEnvServer = self._services.shared.get(("openenv", url), lambda: OpenEnvServer(url))
        return ServedEnvironment(server, self._lease.episode_id, options, self.settings)


class OpenEnvServer:
    """One worker's connections to a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), trust_env=False)
        self._fields: tuple[str, ...] | None = None

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """Raises `aiohttp.ClientError`."""
        return await self._http.ws_connect(f"{self.url}/ws", max_msg_size=16 << 20, heartbeat=30)

    async def action_field(self, preferred: str) -> str:
        """The field that an answer's text goes to. Raises `InfraFailure` naming those that there are."""
        if self._fields is None:
            async with self._http.get(f"{self.url}/schema") as answer:
                answer.raise_for_status()
                action = (await answer.json()).get("action", {})
            fields = action.get("properties", {})
            self._fields = tuple(name for name, kind in fields.items() if name != "metadata" and _takes_text(kind))
        if preferred in self._fields or (preferred and not self._fields):
            return preferred
        if not preferred and len(self._fields) == 1:
            return self._fields[0]
        known = ", ".join(self._fields) or "none"
        raise InfraFailure(
            "loop", f"agent.settings.action_field {preferred!r}: text fields of an action at {self.url}: {known}"
        )

    async def close(self) -> None:
        await self._http.close()


def _takes_text(field: Mapping[str, Any]) -> bool:
    """A field of type string, or of a type that strings are part of."""
    return field.get("type") == "string" or any(_takes_text(one) for one in field.get("anyOf", ()))


class ServedEnvironment:
    """The environment of one episode: that of one connection."""

    def __init__(self, server: OpenEnvServer, episode: str, options: dict[str, Any], settings: OpenEnvSettings) -> None:
        self._server, self._episode, self._options, self._settings = server, episode, options, settings
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._field = ""

    async def reset(self, seed: int) -> EnvStep:
        settings = self._settings
        data = {"seed": seed, "episode_id": self._episode, **self._options}
        answer = await within(
            settings.start_timeout_s, f"a place at {self._server.url}", "start_timeout_s", self._enter(data)
        )
        if answer["type"] == "error":
            raise InfraFailure(COMPONENT, f"reset at {self._server.url} with seed {seed}: {_words(answer)}")
        return self._step_of(answer)

    async def step(self, action: str) -> EnvStep:
        answer = await self._ask({"type": "step", "data": {self._field: action}}, "step", "step_timeout_s")
        if answer["type"] == "error" and answer["data"].get("code") == "VALIDATION_ERROR":
            raise InvalidAction(f"That is not an action here: {_words(answer)}")
        if answer["type"] == "error":
            raise StepFailed(_words(answer))
        return self._step_of(answer)

    async def close(self) -> None:
        """The server ends the environment with its connection."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await socket.send_json({"type": "close"})
                    await socket.close()

    async def _enter(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to the reset; where the server has no room or does not answer yet, again later."""
        pauses = BACKOFF.pauses()
        while True:
            try:
                self._field = await self._server.action_field(self._settings.action_field)
                self._socket = await self._server.connect()
                answer = await self._ask({"type": "reset", "data": data}, "reset", "start_timeout_s")
                if answer["type"] != "error" or answer["data"].get("code") != "CAPACITY_REACHED":
                    return answer
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError):
                pass  # `start_timeout_s` ends it, and names the server
            except (aiohttp.ClientError, ValueError) as error:
                raise InfraFailure(COMPONENT, f"{self._server.url}: {type(error).__name__}: {error}") from error
            await self.close()
            await asyncio.sleep(pauses.next_s())

    async def _ask(self, message: Mapping[str, Any], what: str, limit: str) -> dict[str, Any]:
        """One call within the setting `limit`. Raises `InfraFailure`."""
        title = f"{what} at {self._server.url}"
        assert self._socket is not None
        try:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # it may have said why before it closed
                await self._socket.send_json(message)
            received = await within(getattr(self._settings, limit), title, limit, self._socket.receive())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InfraFailure(COMPONENT, f"{title}: {type(error).__name__}: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise InfraFailure(COMPONENT, f"{title}: the connection was closed ({self._socket.close_code})")
        try:
            answer = json.loads(received.data)
            if answer["type"] not in ("observation", "error") or not isinstance(answer["data"], dict):
                raise ValueError(f"type {answer['type']!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise InfraFailure(
                COMPONENT, f"{title}: not an answer of OpenEnv: {received.data[:200]!r} ({error})"
            ) from error
        return dict(answer)

    def _step_of(self, answer: Mapping[str, Any]) -> EnvStep:
        data, settings = answer["data"], self._settings
        observation = data.get("observation") or {}
        reward = data.get("reward")
        if isinstance(reward, bool | int | float) or reward is None:
            text = self._text(observation)[:MAX_OBSERVATION_CHARS]
            return EnvStep(
                text=text,
                reward=float(reward or 0.0),
                terminated=bool(data.get("done")),
                state=json.dumps(observation.get(settings.state), sort_keys=True) if settings.state else text,
                numbers={name: float(one) for name, one in observation.items() if isinstance(one, bool | int | float)},
                shown={name: observation.get(name) for name in settings.show},
            )
        raise InfraFailure(COMPONENT, f"reward of {self._server.url} is not a number: {reward!r}")

    def _text(self, observation: Mapping[str, Any]) -> str:
        name = self._settings.observation_field
        if name and name not in observation:
            known = ", ".join(observation) or "none"
            raise InfraFailure("loop", f"agent.settings.observation_field {name!r}: the observation has {known}")
        if name:
            content = observation[name]
        else:  # its one field, if it has one
            own = {name: value for name, value in observation.items() if name not in ("reward", "done", "metadata")}
            content = next(iter(own.values())) if len(own) == 1 else own
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _words(answer: Mapping[str, Any]) -> str:
    data = answer["data"]
    return f"{data.get('message')} ({data.get('code')})"
