"""`agent.loop: gymnasium`: an environment's own package, in a process per episode.

    worker ──► EnvironmentHost ──starts──► host.py (imports the package once) ──fork──► one process per episode
                     ▲────────────── lines of JSON over a unix socket ──────────────────────┘

Not in the worker: packages block, keep state in globals, and end their process. Not in a box: the package is the
recipe's code, as its loop, its tools and its reward are, and what the model says reaches it as text. An environment
that runs what the model writes as code keeps it in a box itself, or is a tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.agent_loops.environments.loop import EnvironmentLoop, within
from penstock.agent_loops.environments.protocol import COMPONENT, Environment, EnvStep, InvalidAction, StepFailed
from penstock.agent_loops.environments.settings import EnvironmentSettings, GymnasiumSettings
from penstock.agent_loops.errors import InfraFailure
from penstock.common import describe_exit, environment_without_secrets, guard_command
from penstock.transfer_queue import Task

HOST = Path(__file__).with_name("host.py")
MAX_LINE_BYTES = 16 << 20
END_DEADLINE_S = 10.0
STATUS_DEADLINE_S = 5.0
log = logging.getLogger(__name__)


class GymnasiumLoop(EnvironmentLoop):
    """Runs `agent.settings.env` (`GymnasiumSettings`)."""

    settings_kind: ClassVar[type[EnvironmentSettings]] = GymnasiumSettings
    settings: GymnasiumSettings

    async def open(self, task: Task, options: dict[str, Any]) -> Environment:
        """Open an environment on the worker's host of this kind; the first episode starts the host."""
        settings = self.settings
        name = _absolute(settings.env, self._services.recipe_dir)
        path = tuple(map(os.path.abspath, settings.path))
        key = ("environment", name, path)
        host: EnvironmentHost = self._services.shared.get(key, lambda: EnvironmentHost(name, path))
        return await host.open(options, settings)


def _absolute(env: str, recipe_dir: Path) -> str:
    """A file next to the recipe, or below the current directory, by its whole path."""
    file, _, name = env.rpartition(":")
    if not file.endswith(".py"):
        return env
    candidates = [(folder / file).resolve() for folder in (recipe_dir, Path.cwd())]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise InfraFailure("loop", f"agent.settings.env: no file {file!r}; looked at {', '.join(map(str, candidates))}")
    return f"{path}:{name}"


@dataclass(slots=True)
class HostConnection:
    """One of a host's or of an episode's process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: Mapping[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Returns the next message; None at the end of the stream."""
        try:
            line = await self.reader.readline()
        except (ConnectionError, ValueError) as error:
            log.debug("a connection to an environment broke: %s", error)
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message


class EnvironmentHost:
    """One worker's host of one kind of environment. Started by the first `open`, and again if it ended."""

    def __init__(self, env: str, path: tuple[str, ...]) -> None:
        self._env, self._path = env, path
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._server: asyncio.Server | None = None
        self._control: HostConnection | None = None
        self._arrivals: dict[int, asyncio.Future[HostConnection]] = {}
        """Episode (0: the host) → its connection, once it has connected."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        """Episode → wait status of its process."""
        self._reading: asyncio.Task[None] | None = None

    async def open(self, options: dict[str, Any], settings: GymnasiumSettings) -> Environment:
        """A process for one episode. Raises `InfraFailure`."""
        await within(settings.start_timeout_s, f"the import of {self._env}", "start_timeout_s", self._start())
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        arrived = self._arrivals[number] = loop.create_future()
        self._ends[number] = loop.create_future()
        assert self._control is not None
        self._control.send({"fork": number})
        try:
            connection = await within(
                settings.start_timeout_s, f"a process of {self._env}", "start_timeout_s", self._first(arrived, number)
            )
        except BaseException:
            self.end(number)
            self.forget(number)
            raise
        finally:
            self._arrivals.pop(number, None)
        return ProcessEnvironment(self, number, connection, options, settings)

    def end(self, number: int) -> None:
        """Kills an episode's process with all it started."""
        if self._control is not None and not self._control.writer.is_closing():
            self._control.send({"end": number})

    async def status(self, number: int) -> str:
        """Describe the end of an episode's process, which is ending or has ended."""
        ended = self._ends.get(number)
        try:
            async with asyncio.timeout(STATUS_DEADLINE_S):
                return describe_exit(os.waitstatus_to_exitcode(await asyncio.shield(ended))) if ended else "ended"
        except TimeoutError:
            return "ended, with the host of its kind"

    def forget(self, number: int) -> None:
        """The episode is over."""
        self._ends.pop(number, None)

    async def close(self) -> None:
        """Ends the host, and with it every process of an episode."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._control is not None:
            self._control.writer.close()
        if self._server is not None:
            self._server.close()
        self._all_ended()
        process, self._process, self._control = self._process, None, None
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()  # its guard ends the whole group
            try:
                async with asyncio.timeout(END_DEADLINE_S + 5):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    # the host's process --------------------------------------------------------------------------------------------
    async def _start(self) -> None:
        async with self._starting:
            if self._control is not None:
                return
            await self.close()
            try:
                await self._begin()
            except BaseException:
                await self.close()
                raise

    async def _begin(self) -> None:
        name = f"penstock-environment-{os.getpid()}-{secrets.token_hex(12)}"
        # An abstract name leaves no file behind after a kill. Other users may connect: `_is_ours` checks their uid.
        self._server = await asyncio.start_unix_server(self._connected, "\0" + name, limit=MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        arrived = self._arrivals[0] = loop.create_future()
        self._process = await asyncio.create_subprocess_exec(
            *guard_command([sys.executable, "-P", str(HOST), json.dumps({"unix": name})]),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=self._variables(),
        )
        control = await self._first(arrived, 0)
        control.send({"env": self._env, "path": list(self._path)})
        answer = await control.receive()
        if answer is None or "error" in answer:
            raise InfraFailure(
                COMPONENT, f"{self._env} cannot be imported: {(answer or {}).get('error', 'its process ended')}"
            )
        self._control = control
        self._reading = asyncio.create_task(self._read(control), name="environment host")

    def _variables(self) -> dict[str, str]:
        """Without our secrets. One seed of string hashes: sets have one order in all workers."""
        # A fork has none of its parent's threads: libraries that start some at import must not.
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        usual = environment_without_secrets()
        path = os.pathsep.join([*self._path, *filter(None, [usual.get("PYTHONPATH", "")])])
        return {**one_thread, **usual, "PYTHONHASHSEED": "0", "PYTHONPATH": path}

    async def _first(self, arrived: asyncio.Future[HostConnection], number: int) -> HostConnection:
        """The connection of a process that was started; fails if that ends before it connects."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait() if number == 0 else asyncio.shield(self._ends[number]))
        either: set[asyncio.Future[Any]] = {arrived, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not arrived.done():
            raise InfraFailure(COMPONENT, f"the process of {self._env} ended before it connected")
        return arrived.result()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = HostConnection(reader, writer)
        first = await connection.receive() if _is_ours(writer) else None
        waiting = self._arrivals.get(first.get("episode", 0)) if first is not None else None
        if waiting is None or waiting.done():
            writer.close()
        else:
            waiting.set_result(connection)

    async def _read(self, control: HostConnection) -> None:
        """Takes reports of ended processes. The host's own end leaves `_control` empty: the next `open` starts one."""
        while (message := await control.receive()) is not None:
            ended = self._ends.get(message.get("ended", -1))
            if ended is not None and not ended.done():
                ended.set_result(message["status"])
        log.warning("the host of environment %s ended", self._env)
        self._control = None
        self._all_ended()

    def _all_ended(self) -> None:
        """Episodes' processes die with their host."""
        for ended in self._ends.values():
            if not ended.done():
                ended.set_result(signal.SIGKILL)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Returns whether the process at the other end has this process's user."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", peer)[1] == os.getuid()


class ProcessEnvironment:
    """The environment of one episode, in its process."""

    def __init__(
        self,
        host: EnvironmentHost,
        number: int,
        connection: HostConnection,
        options: dict[str, Any],
        settings: GymnasiumSettings,
    ) -> None:
        self._host, self._number, self._connection = host, number, connection
        self._options, self._settings = options, settings
        self._steps = 0
        self._closed = False
        self._broken = False
        """A call was late, cancelled or unanswered: another one would get its answer."""

    async def reset(self, seed: int) -> EnvStep:
        fields = ("actions", "observe", "rewards", "show", "state")
        settings = self._settings.model_dump(include=set(fields))
        request = {"op": "reset", "options": self._options, "seed": seed, "settings": settings}
        answer = await self._ask(request, "reset", "start_timeout_s")
        if "error" in answer:
            raise InfraFailure(COMPONENT, f"reset of {self._settings.env} with seed {seed} raised {answer['error']}")
        return EnvStep(**answer)

    async def step(self, action: str) -> EnvStep:
        self._steps += 1
        answer = await self._ask({"op": "step", "action": action}, "step", "step_timeout_s")
        if "error" in answer:
            raise StepFailed(answer["error"])
        if "invalid" in answer:
            raise InvalidAction(answer["invalid"])
        return EnvStep(**answer)

    async def close(self) -> None:
        """Asks for its own `close`, waits a moment, and kills its process."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._broken:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_DEADLINE_S):
                        self._connection.send({"op": "close"})
                        await self._connection.receive()
            self._host.end(self._number)
            # Before its connection is closed, at which it would end by itself: what it started is found below it.
            await self._host.status(self._number)
        finally:
            self._host.end(self._number)
            self._connection.writer.close()
            self._host.forget(self._number)

    async def _ask(self, message: dict[str, Any], what: str, limit: str) -> dict[str, Any]:
        """One call within the setting `limit`. Raises `InfraFailure`."""
        title = f"{what} {self._steps} of {self._settings.env}" if what == "step" else f"reset of {self._settings.env}"
        self._broken = True
        self._connection.send(message)
        answer = await within(getattr(self._settings, limit), title, limit, self._connection.receive())
        self._broken = False
        if answer is None:
            self._broken = True
            raise InfraFailure(COMPONENT, f"{title}: its process {await self._host.status(self._number)}")
        return dict(answer)
