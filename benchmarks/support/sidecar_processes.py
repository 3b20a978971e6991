"""Tokens per second of a sidecar of one process and of several, before an engine that only streams (`FakeHttpEngine`).

    python -m benchmarks.support.sidecar_processes    a server, as a child of the benchmark: see `Child`

    {"do": "start", "processes": N, "slots": …} → {"url"}        {"do": "cpu"} → {"sidecar_s", "engine_s"}

The engine sends an event for each token and request as fast as it can. The load generator is the benchmark's own
process, with `RolloutClient`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import uvloop

from benchmarks.support.child import Child, own_stdout
from benchmarks.support.comparison import say
from benchmarks.support.load import Ask, Load, Took, run_load
from benchmarks.support.measure import family
from benchmarks.support.rollout_run import cpu_s
from penstock.rollout_server import GenerateRequest, RolloutClient, RolloutConfig, Sampling, ServerJob, serve
from penstock.testing import FakeHttpEngine
from penstock.transfer_queue import Announcement, AnnouncementMark, RunContext, ServerInfo, Status, WeightUpdate

TOKEN = "a-token-of-the-benchmark"  # noqa: S105 - of a server of this machine, for a minute
VOCAB = 512
STARTS_S = 60.0
TIMEOUT_S = 300.0


class OneServer:
    """The registry of one server, and no version but the first: what a server and a client ask of a queue."""

    def __init__(self, url: str = "") -> None:
        self.registered = {"s0": ServerInfo("s0", url, 0)} if url else {}

    async def latest_version(self) -> Announcement | None:
        return None

    async def latest_mark(self) -> AnnouncementMark | None:
        return None

    async def heartbeat(self, server: ServerInfo) -> None:
        self.registered[server.server_id] = server

    async def deregister(self, server_id: str) -> None:
        self.registered.pop(server_id, None)

    async def report_update(self, update: WeightUpdate) -> None:
        raise AssertionError("no version is announced")

    async def servers(self) -> list[ServerInfo]:
        return list(self.registered.values())

    async def status(self) -> Status:
        return Status(0, 0, 0, {}, {}, 0, {}, {})


# the benchmark's side ----------------------------------------------------------------------------------------------
async def measure_processes(counts: list[int], level: int, answer_tokens: int, rounds: int) -> dict[str, Any]:
    """processes → figures; under ``ratio`` the median of each round's tokens/s over that of the first count."""
    took: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for number in range(rounds):
        for count in counts if number % 2 == 0 else reversed(counts):
            took[count].append(await _one_round(count, level, answer_tokens))
            say(f"rollout: round {number + 1}, {count} processes: {took[count][-1]['tokens_per_s']:.0f} tokens/s")
    figures = {str(count): _middle(took[count]) for count in counts}
    first = counts[0]
    names = {count: f"tokens_{count}_processes_over_{first}" for count in counts[1:]}
    return {"figures": figures, "ratio": {name: _over(took[count], took[first]) for count, name in names.items()}}


def _over(rounds: list[dict[str, float]], base: list[dict[str, float]]) -> float:
    """Median of the rounds' own ratios."""
    pairs = zip(rounds, base, strict=True)
    return round(median(one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs), 3)


def _middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(one[name] for one in rounds), 4) for name in rounds[0]}


async def _one_round(processes: int, level: int, answer_tokens: int) -> dict[str, float]:
    child = await Child.module("benchmarks.support.sidecar_processes", env={})
    try:
        started = await child.ask({"do": "start", "processes": processes, "slots": level}, STARTS_S)
        client = RolloutClient(OneServer(started["url"]), TOKEN, TIMEOUT_S)
        try:
            warm = Load(level, 16, 16, VOCAB, seed="warm")
            await run_load(warm, partial(_stream, client), asyncio.Event())
            before, cpu_began = await child.ask({"do": "cpu"}), time.process_time()
            load = Load(level, 16, answer_tokens, VOCAB)
            tally = await run_load(load, partial(_stream, client), asyncio.Event())
            took, after = Took.of(tally, time.process_time() - cpu_began), await child.ask({"do": "cpu"})
        finally:
            await client.close()
    finally:
        await child.stop()
    spent = {name: (after[name] - before[name]) / took.tokens * 1e3 for name in ("sidecar_s", "engine_s")}
    return {
        "tokens_per_s": took.tokens_per_s,
        "sidecar_cpu_s_per_1000": spent["sidecar_s"],
        "engine_cpu_s_per_1000": spent["engine_s"],
        "client_cpu_s_per_1000": took.client_cpu_s / took.tokens * 1e3,
    }


async def _stream(client: RolloutClient, ask: Ask) -> AsyncGenerator[int]:
    sampling = Sampling(max_new_tokens=ask.answer_tokens)
    async with aclosing(client.stream(GenerateRequest(token_ids=ask.token_ids, sampling=sampling))) as chunks:
        async for chunk in chunks:
            yield len(chunk.token_ids)


# the child's side --------------------------------------------------------------------------------------------------
class ServerUnderLoad:
    """One rollout server in this process, its further processes and its engine below it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._queue = folder, OneServer()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, processes: int, slots: int) -> dict[str, Any]:
        config = RolloutConfig(
            engine="vllm",
            sidecar_processes=processes,
            max_concurrent=slots,
            max_model_len=1 << 16,
            request_timeout_s=TIMEOUT_S,
        )
        run = RunContext(self._queue, str(self._folder), TOKEN)  # type: ignore[arg-type]
        job = ServerJob("s0", run, config, self._folder)
        self._serving = asyncio.create_task(serve(job, partial(FakeHttpEngine, quick=True)))
        async with asyncio.timeout(STARTS_S):
            while "s0" not in self._queue.registered or len(_sidecars()) < processes:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)  # further processes import and begin
        return {"url": self._queue.registered["s0"].url}

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)


def _sidecars() -> list[int]:
    return [os.getpid(), *(pid for pid in family(os.getpid())[1:] if "answer_server" in _words(pid))]


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _cpu() -> dict[str, float]:
    sidecars = _sidecars()
    others = [pid for pid in family(os.getpid()) if pid not in sidecars]
    return {"sidecar_s": cpu_s(sidecars), "engine_s": cpu_s(others)}


async def answer(replies: IO[str]) -> None:
    """Until stdin ends."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        server = ServerUnderLoad(Path(folder))
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                question = json.loads(line)
                starts = question["do"] == "start"
                reply = await server.start(question["processes"], question["slots"]) if starts else _cpu()
                replies.write(json.dumps(reply) + "\n")
                replies.flush()
        finally:
            await server.stop()


if __name__ == "__main__":
    uvloop.run(answer(own_stdout()))
