"""An inference server as a child process: its Python environment and flags, its private folder.

It runs under `penstock.common.guard`, in its own process group: it ends with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from penstock.common import (
    FileLock,
    environment_without_secrets,
    guard_command,
    kill_group,
    load_on_devices,
    visible_devices,
)
from penstock.common.device_locks import DeviceBusy
from penstock.common.guard import GRACE_S
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import start_deadline_s
from penstock.rollout_server.engines.child import Child, up_file
from penstock.rollout_server.engines.http.event_client import EngineAddress, EventClient
from penstock.rollout_server.engines.http.stream import AnswerStream, refusal
from penstock.rollout_server.protocol import EngineError, SleepLevel

PROBE_S = 60.0
UP_S = 10.0
"""A trainer that looks whether the server is up has the file's lock for a moment."""


@dataclass(frozen=True)
class Installation:
    """A Python environment that holds the server."""

    python: str
    version: str
    cpu: bool
    """The build for CPUs, or no GPU is seen."""
    nccl: str = ""
    """Version of the NCCL that its workers load; empty if it is not known or they have no GPU."""


@dataclass(frozen=True)
class Product:
    """A stock server as it is found and started."""

    title: str
    """Name of the product in messages."""
    key: str
    """Name in settings, folders and scripts: ``rollout.KEY_python``, ``.venv-KEY``, ``scripts/setup-KEY``."""
    floor: tuple[int, ...]
    """The oldest version that will do."""
    ceiling: tuple[int, ...]
    """The first version beyond the tested ones: routes and flags change from one to the next."""
    probe: str
    """A program that prints what is installed, as JSON."""
    own_flags: frozenset[str]
    """Flags that the adapter depends on."""
    help_command: Callable[[Installation], list[str]]
    """Returns the command that lists all flags of the server."""
    requantises: tuple[str, ...] = ()
    """Quantisations that it computes from unquantised weights, at its start and at each update."""

    @property
    def fix(self) -> str:
        return (
            f"pip install 'penstock[{self.key}]', or scripts/setup-{self.key} of a clone, which makes an environment"
            f" for it; rollout.{self.key}_python may name another Python"
        )

    def find_python(self, configured: str | None) -> str:
        """`configured`, else .venv-KEY in this folder or one above it, else this interpreter."""
        if configured is not None:
            if not os.access(configured, os.X_OK):
                raise EngineError(f"rollout.{self.key}_python: {configured} cannot be run; {self.fix}", retryable=False)
            return configured
        here = Path.cwd()
        candidates = [folder / f".venv-{self.key}/bin/python" for folder in (here, *here.parents)]
        return next((str(path) for path in candidates if os.access(path, os.X_OK)), sys.executable)

    async def ask(self, python: str) -> dict[str, Any]:
        """Runs `probe` there and returns its JSON. Raises `EngineError`."""
        process = await asyncio.create_subprocess_exec(
            python, "-I", "-c", self.probe, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), PROBE_S)
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise EngineError(f"{python} did not answer within {PROBE_S:g} s") from error
        if process.returncode:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise EngineError(f"{python} cannot be asked for {self.title}: {reason}; {self.fix}", retryable=False)
        versions: dict[str, Any] = json.loads(output)
        return versions

    def check_version(self, python: str, version: str | None) -> str:
        """`version`, if there is one and it is of the tested range. Raises `EngineError` with the fix."""
        if version is None:
            raise EngineError(f"{python} has no {self.title}; {self.fix}", retryable=False)
        floor, ceiling = (".".join(map(str, end)) for end in (self.floor, self.ceiling))
        numbers, tested = _numbers(version), f"Penstock is tested with {floor} and later, below {ceiling}"
        if not self.floor <= numbers < self.ceiling:
            age = "older" if numbers < self.floor else "newer"
            raise EngineError(
                f"{self.title} {version} in {python} is {age} than what will do: {tested}; {self.fix}", retryable=False
            )
        return version

    def merge_flags(self, ours: dict[str, Any], users: dict[str, Any]) -> dict[str, Any]:
        """A user's flag replaces ours of that name. Raises `EngineError` where the adapter needs its own."""
        flags = {name.replace("_", "-"): value for name, value in users.items()}
        if taken := sorted(flags.keys() & self.own_flags):
            raise EngineError(
                f"rollout.{self.key}_args.{taken[0]} is set by Penstock itself; remove it", retryable=False
            )
        return {**ours, **flags}


def inherited_environment() -> dict[str, str]:
    """Environment of a server in its own Python: without secrets, and without paths to this one's packages."""
    environment = environment_without_secrets()
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def flag_words(flags: dict[str, Any], *, negative: bool) -> list[str]:
    """A command line. `negative`: the server's switches have a ``--no-…`` form. None leaves a flag out."""
    return [word for name, value in flags.items() for word in _words(name, value, negative)]


def _words(name: str, value: Any, negative: bool) -> list[str]:
    if value is None or (value is False and not negative):
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23", "0.5.23rc1" and "0.5.23+local"."""
    numbers = []
    for part in version.split("+", maxsplit=1)[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


class ChildServer(Child, ABC):
    """One server process. `start` comes first, `stop` last."""

    product: ClassVar[Product]
    ready_path: ClassVar[str]
    """Answers 200 once the server takes requests."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        super().__init__(self.product.title, log_dir / f"{self.product.key}.log")
        self.config, self.model, self.seed = config, model, seed
        self.http: aiohttp.ClientSession
        """Client for control calls."""
        self.events: EventClient
        """Client for answers."""
        self.streams: set[AnswerStream] = set()
        """Answers that are being read."""
        self.folder = Path()
        """Private to this user: sockets, keys, links to weights."""
        self.installation: Installation | None = None
        """Known from the start on."""
        self.address: EngineAddress | None = None
        """Address of the server while it is connected."""
        self.sleep_level: SleepLevel | None = None
        """Under placement.colocated; None: it never sleeps."""
        self.timeout_s = config.start_timeout_s
        """Seconds that a start may take, and a call that reads, compares or loads weights. `start` adds their size."""
        self._up = FileLock(up_file(log_dir), "another server has this folder of logs", error=EngineError)

    @abstractmethod
    async def find_installation(self) -> Installation:
        """Raises `EngineError` with the fix if there is none that can be used."""

    @abstractmethod
    def prepare(self, installation: Installation) -> tuple[EngineAddress, list[str], dict[str, str]]:
        """(where the server will listen, the command that starts it, its environment)."""

    async def start(self) -> Installation:
        """Returns when the server answers; raises `EngineError` with the cause if it does not in time."""
        self.installation = installation = await self.find_installation()
        self.timeout_s = start_deadline_s(self.config.start_timeout_s, Path(self.model))
        devices = () if installation.cpu else visible_devices()
        try:
            async with load_on_devices(f"{self.name} of {self.log_path.parent}", devices):
                await self._start(installation)
        except DeviceBusy as error:
            raise EngineError(str(error)) from error
        return installation

    async def _start(self, installation: Installation) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"penstock-{self.product.key}-"))
        try:
            address, command, environment = self.prepare(installation)
            self.http, self.events, self.address = address.session(), EventClient(address), address
            await self.spawn(guard_command(command), environment, stdin=asyncio.subprocess.PIPE)
            await self._until_ready(self.timeout_s)
            await self._up.acquire_within(UP_S)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the whole process group; a second call does nothing."""
        folder, self.folder = self.folder, Path()
        if folder == Path():
            return
        self._up.release()
        for stream in self.streams:
            stream.break_off("the server is being stopped")
        if self.address is not None:  # an orderly end waits for its connections
            self.address = None
            await self.events.close()
            await self.http.close()
        if (process := self.process) is not None:
            assert process.stdin is not None
            process.stdin.close()  # the guard sees the end of its input
            try:
                await asyncio.wait_for(process.wait(), 2 * GRACE_S + 2)
            except TimeoutError:  # the guard does not run either: stopped, or the machine is that busy
                kill_group(process.pid)
                await process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Returns the answer to a control request, as `send` does."""
        answer: dict[str, Any] = json.loads(await self.send(method, path, body, timeout_s))
        return answer

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        """Returns the content of the answer, within `timeout_s` or the server's. Raises `EngineError`: refused, too
        slow, or the server is gone."""
        within_s = self.timeout_s if timeout_s is None else timeout_s
        # A connection for each call: servers close the one on which a call failed, and the next must not meet that.
        headers, timeout = {"Connection": "close"}, aiohttp.ClientTimeout(total=within_s)
        try:
            async with self.http.request(method, path, json=body, headers=headers, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:  # the last: the client was closed by `stop`
            raise EngineError(f"{self.name} does not answer {path}: {error!r}; {self.cause()}") from error
        if response.status != HTTPStatus.OK:
            raise refusal(self.name, response.status, content)
        return content

    async def answers(self, path: str, timeout_s: float) -> bool:
        """Returns True if GET `path` is answered with 200 in time."""
        if not self.alive:
            return False
        try:
            async with self.http.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                return response.status == HTTPStatus.OK
        except (aiohttp.ClientError, TimeoutError, RuntimeError):  # the last: the client was closed by `stop`
            return False

    async def _until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise EngineError(f"{self.name} ended while it started: {self.cause()}")
            if await self.answers(self.ready_path, 5):
                return
            await asyncio.sleep(0.2)
        of_it = f"rollout.start_timeout_s, {self.config.start_timeout_s:g} s, and what its weights' size adds"
        raise EngineError(f"{self.name} was not up within {timeout_s:g} s ({of_it}); its log ends with:\n{self.tail()}")
