"""A run of rollout servers alone: a redis-server, the queue's run and `penstock rollout` processes.

The bare engine of a comparison is the process that a sidecar started, asked directly: the same weights at the same
place in memory. It is found among the sidecar's descendants (Linux; the caller must be the user who started it).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.child import ROOT, Child
from benchmarks.support.measure import PROC, family
from penstock.deploy import RoleProcess, RoleSpec, RunConfig, RunConnection, dump_config, limits_of
from penstock.transfer_queue import RedisServer, RedisTransferQueue


class NoEngine(Exception):
    """The sidecar has no such engine."""


def find_address(sidecar: int, engine: str) -> dict[str, str]:
    """``url``, ``key`` and, where it listens on one, ``socket``. `sidecar` is its process id."""
    for pid in family(sidecar):
        words = _words(pid)
        if engine == "vllm" and "--uds" in words:
            # The guard that started it has the same command line; both have the key.
            return {"url": "http://vllm", "socket": _after(words, "--uds"), "key": _variable(pid, "VLLM_API_KEY")}
        if engine == "sglang" and "--port" in words and "--config" in words:
            key = Path(_after(words, "--config")).read_text().partition("api-key:")[2].strip()
            return {"url": f"http://127.0.0.1:{_after(words, '--port')}", "socket": "", "key": key}
    raise NoEngine(f"process {sidecar} has started no {engine} that can be asked directly")


def cpu_s(pids: list[int]) -> float:
    """Time on a core, of all threads that these processes have now; what ended meanwhile counts as nothing."""
    return sum(_run_ns(task) for pid in pids for task in (PROC / str(pid) / "task").glob("*")) / 1e9


def engine_pids(sidecar: int) -> list[int]:
    """Everything below the sidecar."""
    return family(sidecar)[1:]


def _words(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def _variable(pid: int, name: str) -> str:
    pairs = (PROC / str(pid) / "environ").read_text(errors="replace").split("\0")
    return next(pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}="))


def _run_ns(task: Path) -> int:
    """The first number of the scheduler's own account, to the nanosecond; `stat` counts in hundredths of a second."""
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return 0


STARTS_S = 300.0
STOPS_S = 30.0
ONE_EPISODE = {"group_size": 1, "groups_per_step": 1}
"""A step, which a version needs to be announced; see `queue_calls.make_ready`."""


@dataclass(frozen=True)
class Server:
    """One rollout server that takes requests."""

    name: str
    url: str
    pid: int
    """Of the sidecar."""
    link: RunConnection
    queue: RedisTransferQueue

    def address(self, engine: str) -> dict[str, str]:
        return find_address(self.pid, engine)


@asynccontextmanager
async def redis_host() -> AsyncIterator[tuple[str, str]]:
    """(URL, password) of a redis-server, set as `penstock run` sets it."""
    password = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with RedisServer(Path(folder), password) as server:
            yield server.url, password


@asynccontextmanager
async def rollout_servers(
    redis: tuple[str, str], settings: dict[str, Any], names: Sequence[str], cores: Sequence[set[int]] = ()
) -> AsyncIterator[list[Server]]:
    """`penstock rollout` once for each name, all of one run, each in the registry. They end with the block.

    `settings` are a recipe's. `cores`: which ones each server, its engine included, may use; empty: all.
    """
    config = RunConfig(data={"train": "generate:calculator"}, **ONE_EPISODE, **settings)
    link = RunConnection(redis[0], config.name, redis[1], secrets.token_urlsafe(16))
    queue = await link.connect(config.transfer_queue)
    await queue.create_run(limits_of(config), dump_config(config))
    roles = [_role(name, link, Path(config.runs_dir)) for name in names]
    tasks = [asyncio.create_task(_pinned(role, number, cores)) for number, role in enumerate(roles)]
    try:
        urls = await _registered(queue, len(names), tasks)
        yield [Server(role.spec.name, urls[role.spec.name], role.pid or 0, link, queue) for role in roles]
    finally:
        await asyncio.gather(*(role.stop() for role in roles))
        await asyncio.gather(*tasks, return_exceptions=True)
        await queue.close()


def engine_args(engine: str) -> dict[str, Any]:
    """Further flags of a stock engine, from PENSTOCK_BENCH_ENGINE_ARGS (a JSON object), as settings of a recipe."""
    given = json.loads(os.environ.get("PENSTOCK_BENCH_ENGINE_ARGS", "{}"))
    return {f"{engine}_args": given} if given else {}


async def load_process(server: Server, cores: set[int] | None = None) -> Child:
    """A generator of load, as a separate process, that may ask this server's run."""
    child = await Child.module("benchmarks.support.load_child", env=server.link.environment())
    if cores:
        os.sched_setaffinity(child.pid, cores)
    return child


def _role(name: str, link: RunConnection, folder: Path) -> RoleProcess:
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "PENSTOCK_SUPERVISED": "1", "PENSTOCK_LOG": "WARNING"}
    argv = [sys.executable, "-m", "penstock.deploy.cli", "rollout", "--name", name]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    return RoleProcess(RoleSpec(name, argv, {**env, **link.environment()}, log, max_restarts=0, stop_grace_s=STOPS_S))


async def _pinned(role: RoleProcess, number: int, cores: Sequence[set[int]]) -> None:
    """The role's process inherits this one's cores at its start, and the engine its."""
    running = asyncio.create_task(role.run())
    try:
        while role.pid is None and not running.done():  # noqa: ASYNC110 - another class's state: there is no event
            await asyncio.sleep(0.01)
        if cores and role.pid is not None:
            os.sched_setaffinity(role.pid, cores[number])
        await running
    finally:
        running.cancel()


async def _registered(queue: RedisTransferQueue, count: int, tasks: Sequence[asyncio.Task[None]]) -> dict[str, str]:
    """name → URL, once all take requests. Raises what a server that ended early raised."""
    async with asyncio.timeout(STARTS_S):
        while True:
            found = {server.server_id: server.url for server in await queue.servers() if server.accepting}
            if len(found) == count:
                return found
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)
