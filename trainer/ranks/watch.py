"""A rank's side of the watch over all ranks: notes of what it does, and the monitor beside it (`ranks.monitor`).

    event loop      task: its turn, every `LOOK_S`                                       ─┐
    watch thread    what the torch thread is in, every `LOOK_S`                          ─┴► notes ──► monitor
    torch thread    `TorchThread.work` names the function that runs

No other rank waits for one that is alone: then nothing is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType, TracebackType
from typing import IO

from penstock.common import own_host
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.ranks.monitor import MonitorSettings
from penstock.trainer.ranks.observer import LOOK_S, NOTES_BYTES, STALE_S, Notes, write_notes

END_S = 15.0
"""For the monitor's own end: where its rank failed, it waits some seconds for the report of a rank that is gone."""
START_S = 60.0
DEEPEST = 3
"""Innermost calls among which a wait for other ranks is looked for: operators stand between it and the thread's end."""
WAITING_IN = (
    *("/torch/distributed/", "/megatron/core/pipeline_parallel/", "/megatron/core/tensor_parallel/"),
    *("/filelock/", "/huggingface_hub/", "/torch/utils/file_baton.py"),
)
"""Parts of the paths of files whose calls wait for other ranks: in collectives, and for a file that one of them fetches
or compiles."""
BACKWARD = "_engine_run_backward"
"""torch's name for a backward: other threads of its own compute meanwhile, and wait for other ranks."""


class RankWatch:
    """Of one rank. `start` is a collective; `leave` says how the rank ends, `close` ends the watch."""

    def __init__(self, in_torch: TorchThread) -> None:
        self._in_torch = in_torch
        self._notes = os.memfd_create("penstock-rank-notes", os.MFD_CLOEXEC)
        os.ftruncate(self._notes, NOTES_BYTES)
        self._memory = mmap.mmap(self._notes, NOTES_BYTES)
        self._monitor = subprocess.Popen(
            [sys.executable, "-m", "penstock.trainer.ranks.monitor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._notes,),
        )
        self._thread = threading.Thread(target=self._write_notes, name="rank watch", daemon=True)
        self._loop_at = time.monotonic()
        self._over = threading.Event()
        self._left = False
        self._turning: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, ranks: Ranks, in_torch: TorchThread, timeout_s: float) -> RankWatch | None:
        """None where there is nothing to watch: one rank, or `timeout_s` 0. Raises `RuntimeError`."""
        if ranks.world == 1 or not timeout_s:
            return None
        watch = await asyncio.to_thread(cls, in_torch)
        watch._turning = asyncio.create_task(watch._turn(), name="rank watch")
        host, secret = hub_host(ranks.world), secrets.token_hex(16)
        port = await asyncio.to_thread(watch._introduce, ranks, timeout_s, host, secret)
        watch._order(await in_torch(ranks.from_rank0, {"hub": [host, port], "secret": secret}))
        return watch

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """As the exit of a context: the rank ends, with this error or in order. The first call counts."""
        if self._left:
            return
        self._left = True
        failed = isinstance(error, Exception)
        self._order({"left": f"{type(error).__name__}: {error}"[:2000] if failed else ""})

    async def close(self) -> None:
        """Waits for the monitor, `END_S` at most."""
        self.leave(None, None, None)
        self._over.set()
        if self._turning is not None:
            self._turning.cancel()
        await asyncio.to_thread(_end, self._monitor)

    def _introduce(self, ranks: Ranks, timeout_s: float, host: str, secret: str) -> int:
        """The monitor's port, where it is the hub. Raises `RuntimeError` where it does not start."""
        self._thread.start()
        settings = MonitorSettings(
            rank=ranks.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            timeout_s=timeout_s,
            memory_fd=self._notes,
            own_threads=[self._thread.native_id or 0],
            ends_stuck=ranks.device.type == "cpu",
            speaks=os.environ.get("LOCAL_RANK", "0") == "0",
            secret=secret if ranks.is_rank0 else "",
            listen=hub_binding(host) if ranks.is_rank0 else "",
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
        )
        self._order(asdict(settings))
        assert self._monitor.stdout is not None
        killer = threading.Timer(START_S, self._monitor.kill)
        killer.start()
        try:
            line = self._monitor.stdout.readline()
        finally:
            killer.cancel()
            os.close(self._notes)
        if not line:
            raise RuntimeError(
                f"the monitor of rank {settings.rank} ended, or did not start within {START_S:g} s; see the log"
            )
        return int(json.loads(line)["port"])

    def _order(self, content: dict[str, object]) -> None:
        stdin: IO[bytes] | None = self._monitor.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: the hub notices, and decides
            stdin.write(json.dumps(content).encode() + b"\n")
            stdin.flush()

    async def _turn(self) -> None:
        while True:
            self._loop_at = time.monotonic()
            await asyncio.sleep(LOOK_S)

    def _write_notes(self) -> None:
        while not self._over.wait(LOOK_S):
            write_notes(self._memory, self._look())

    def _look(self) -> Notes:
        # No frame is kept: what its function has freed, tensors for one, would live as long.
        now, (name, since) = time.monotonic(), self._in_torch.work
        calls = list(_outwards(_frame_of(self._in_torch.ident)))
        doing = f"{name} ({_named(calls)})" if since else f"no work in its torch thread after {name or 'none'}"
        if now - self._loop_at > STALE_S:
            main = list(_outwards(_frame_of(threading.main_thread().ident)))
            doing += f"; its event loop stands in {_named(main)}"
        return Notes(now, self._loop_at, since, bool(since) and is_waiting(calls), doing)


def hub_host(world: int) -> str:
    """Where rank 0's monitor listens: loopback where all ranks are on this machine."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    return "127.0.0.1" if local == world else own_host()


def hub_binding(host: str) -> str:
    """What the hub listens on as `host`: a name may mean loopback here, as Debian's 127.0.1.1 does, and an announced
    address need not be this machine's own."""
    if host == "127.0.0.1":
        return host
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - it asks for the secret


def is_waiting(calls: list[FrameType]) -> bool:
    """Whether a thread in these calls, innermost first, waits for other ranks, or may do so unseen."""
    if calls and calls[0].f_code.co_name == BACKWARD:
        return True
    files = [call.f_code.co_filename.replace(os.sep, "/") for call in calls[:DEEPEST]]
    return any(part in file for file in files for part in WAITING_IN)


def _frame_of(thread: int | None) -> FrameType | None:
    # The dictionary has this call's own frame: a variable for it would be a cycle that keeps all of them.
    return sys._current_frames().get(thread or 0)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _named(calls: list[FrameType]) -> str:
    """The innermost calls, from outside to inside."""
    return " > ".join(_line_of(call) for call in reversed(calls[:DEEPEST])) or "no call"


def _line_of(call: FrameType) -> str:
    folder, file = os.path.split(call.f_code.co_filename)
    return f"{os.path.basename(folder)}/{file}:{call.f_lineno} {call.f_code.co_qualname}"


def _end(monitor: subprocess.Popen[bytes]) -> None:
    for pipe in (monitor.stdin, monitor.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        monitor.wait(END_S)
    except subprocess.TimeoutExpired:
        monitor.kill()
        monitor.wait()
