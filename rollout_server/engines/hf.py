"""The `hf` engine: transformers' continuous batching in a child process, no GPU needed.

HFEngine.generate ── queue per request ◄── _read task ◄── socket pair ◄── hf_server process
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import penstock
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.limits import fit_request
from penstock.rollout_server.protocol import (
    Chunk,
    EngineError,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    Sampling,
    WeightsRefused,
)

PING_S = 10.0
LOAD_S = 300.0
STOP_S = 5.0
LINE_LIMIT_BYTES = 256 << 20


class HFEngine:
    """See `Engine`. `process` is public so that a supervisor can tell a dead engine at once."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int) -> None:
        self.config, self.model, self.seed = config, model, seed
        self.log_path = Path(log_dir) / "engine-hf.log"
        self.info: EngineInfo | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count()
        self._answers: dict[str, asyncio.Queue[Chunk | EngineError]] = {}
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pongs: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._load_lock = asyncio.Lock()

    async def start(self) -> EngineInfo:
        """Start the process; ready once it has sampled a token. Raises `EngineError` with the end of its log."""
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                self._ready = asyncio.get_running_loop().create_future()
                reader = await self._spawn()
                self._reading = asyncio.create_task(self._read(reader))
                self.info = await self._ready
                await self._sample_one()
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"the hf engine was not up in {self.config.start_timeout_s:g} s") from error
        except BaseException:
            await self.stop()
            raise
        return self.info

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "penstock.rollout_server.engines.hf_server", "--fd", str(theirs.fileno())]
        command += ["--model", self.model, "--config", self.config.model_dump_json(), "--seed", str(self.seed)]
        with theirs, self.log_path.open("ab") as log:
            # A session of its own: Ctrl-C reaches the sidecar, which lets the engine finish what is in flight.
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=_environment(self.config.threads),
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT_BYTES)
        return reader

    async def _sample_one(self) -> None:
        request = GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))
        async for _ in self.generate(request):
            pass

    async def stop(self) -> None:
        """End the process: its connection first, a kill after `STOP_S`."""
        if self._writer is not None:
            self._writer.close()
        if self.process is not None and self.process.returncode is None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._reading is not None:
            self._reading.cancel()
        self._fail_all()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`. Raises `BadRequest`, `EngineError`."""
        if self.info is None:
            raise EngineError("the hf engine is not started")
        request = fit_request(request, self.info)
        name = str(next(self._ids))
        answer = self._answers[name] = asyncio.Queue()
        sampling = request.sampling.model_dump()
        try:
            self._send({"op": "generate", "id": name, "token_ids": request.token_ids, "sampling": sampling})
            while True:
                chunk = await self._next(answer)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            if self._answers.pop(name, None) is not None and self.alive:
                self._send({"op": "abort", "id": name})

    async def _next(self, answer: asyncio.Queue[Chunk | EngineError]) -> Chunk:
        timeout_s = self.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                item = await answer.get()
        except TimeoutError as error:
            raise EngineError(f"the hf engine sampled no token for this request in {timeout_s:g} s") from error
        if isinstance(item, EngineError):
            raise item
        return item

    async def load_weights(self, manifest: Mapping[str, Any]) -> LoadReport:
        """See `Engine.load_weights`; one at a time."""
        async with self._load_lock:
            self._send({"op": "load", "manifest": dict(manifest)})
            reply = await self._reply(self._replies, LOAD_S, "to load weights")
        if reply["event"] == "refused":
            raise WeightsRefused(reply["message"])
        return LoadReport(**reply["report"])

    async def healthy(self) -> bool:
        """The process lives and its event loop answers within `PING_S`."""
        try:
            await self.ping()
        except EngineError:
            return False
        return True

    async def ping(self) -> dict[str, Any]:
        """The engine's own figures: steps, in_flight, kv_blocks, version. Raises `EngineError`."""
        self._send({"op": "ping"})
        return await self._reply(self._pongs, PING_S, "a ping")

    async def _reply(self, replies: asyncio.Queue[dict[str, Any]], timeout_s: float, what: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await replies.get()
        except TimeoutError as error:
            raise EngineError(f"the hf engine did not answer {what} in {timeout_s:g} s") from error
        if reply["event"] == "gone":
            raise EngineError(self._cause())
        return reply

    def stderr_tail(self) -> str:
        """The last lines of the engine's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-12:])
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        running = self.process is not None and self.process.returncode is None
        return running and self._reading is not None and not self._reading.done()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is None or not self.alive:
            raise EngineError(self._cause())
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._dispatch(json.loads(line))
        except OSError:
            pass  # a reset connection is a dead engine, like an ended one
        finally:
            self._fail_all()

    def _dispatch(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "tokens":
                for name, chunk in message["answers"]:
                    self._deliver(name, Chunk.model_construct(**chunk))
                for name, error in message["errors"]:
                    self._deliver(name, EngineError(f"the hf engine failed this request: {error}"))
            case "ready":
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(EngineInfo(**message["info"]))
            case "pong":
                self._pongs.put_nowait(message)
            case "loaded" | "refused":
                self._replies.put_nowait(message)

    def _deliver(self, name: str, item: Chunk | EngineError) -> None:
        answer = self._answers.get(name)
        if answer is None:
            return
        if isinstance(item, EngineError) or item.finish_reason:
            del self._answers[name]
        answer.put_nowait(item)

    def _fail_all(self) -> None:
        """Wake everybody who waits for an engine that is gone."""
        cause = EngineError(self._cause())
        for answer in self._answers.values():
            answer.put_nowait(cause)
        self._answers.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(cause)
        for replies in (self._replies, self._pongs):
            replies.put_nowait({"event": "gone"})

    def _cause(self) -> str:
        status = "" if self.process is None or self.process.returncode is None else f" ({self.process.returncode})"
        tail = self.stderr_tail()
        return f"the hf engine is gone{status}" + (f"; the end of {self.log_path}:\n{tail}" if tail else "")


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(penstock.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
