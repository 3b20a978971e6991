"""Images of requests as an engine takes them: made once by a child process (`image_server`), kept by their content.

    requests ─► read ─► kept? ─┬─ yes ──────────────────────► SeenImage
                               └─ no ─► one at a time ─► image_server ─┘

Why a process: pixels are to be the trainer's, so they are made by torch and transformers as it has them, which neither
the sidecar nor the engine's environment has; and megabytes of them must not hold up the tokens of other answers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_link import Link, child_environment, end_child
from penstock.rollout_server.engines.http.server_process import Child
from penstock.rollout_server.pictures import SeenImage
from penstock.rollout_server.protocol import BadRequest, EngineError, ImageRef

KEPT_BYTES = 256 << 20
LAST_WORDS_S = 1.0
"""From the end of the connection to the end of the process."""
NAME = "the process that reads images"


class ImageReader:
    """Owns the process. `start` comes first, `stop` last; `read` may be called by several requests at once."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self._config, self._model = config, model
        self._child = Child("image reader", log_dir / "engine-images.log")
        self._link: Link | None = None
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, SeenImage] = OrderedDict()
        self._held = 0
        self._one_at_a_time = asyncio.Lock()
        """Requests of one group bring the same image: the others find it made."""

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        return self._child.alive and self._link is not None and self._link.is_open

    async def start(self) -> None:
        """Returns when it has the model's processor. Raises `EngineError` where it gets none."""
        self._link = Link(self._reap, self._cause, NAME)
        try:
            await self._spawn(self._link)
            reply = await self._link.call("look", self._config.start_timeout_s)
            if refused := reply.get("refused"):
                raise EngineError(str(refused), retryable=False)
        except BaseException:
            await self.stop()
            raise

    async def _spawn(self, link: Link) -> None:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "penstock.rollout_server.engines.vllm.image_server",
            "--fd",
            str(theirs.fileno()),
        ]
        command += ["--model", self._model, "--dtype", self._config.dtype, "--threads", str(self._config.threads)]
        with theirs:
            await self._child.spawn(command, child_environment(self._config.threads), pass_fds=[theirs.fileno()])
        await link.open(ours)

    async def stop(self) -> None:
        """End the process: its connection first, a kill after `child_link.STOP_S`. A second call does nothing."""
        await end_child(self._child.process, self._link)

    async def read(self, images: Sequence[ImageRef]) -> list[SeenImage]:
        """In order. Raises `BadRequest` naming the one that cannot be read or is none, `EngineError`."""
        return [await self._one(image, f"images.{number}") for number, image in enumerate(images)]

    async def _one(self, image: ImageRef, field: str) -> SeenImage:
        async with self._one_at_a_time:
            found = self._kept.pop(image.sha256, None) or await self._see(image, field)
            self._kept[image.sha256] = found  # now the newest
            self._held = sum(one.nbytes for one in self._kept.values())
            while self._held > self._kept_bytes and len(self._kept) > 1:
                self._held -= self._kept.popitem(last=False)[1].nbytes
        return found

    async def _see(self, image: ImageRef, field: str) -> SeenImage:
        if self._link is None:
            raise EngineError(f"{NAME} is not started")
        reply: dict[str, Any] = await self._link.call("see", self._config.request_timeout_s, image=image.model_dump())
        if refused := reply.get("refused"):
            raise BadRequest(field, str(refused).removeprefix("image: "))
        return SeenImage(image.sha256, int(reply["tokens"]), reply["item"])

    async def _reap(self) -> None:
        if self._child.process is not None:
            await asyncio.wait({asyncio.ensure_future(self._child.process.wait())}, timeout=LAST_WORDS_S)

    def _cause(self) -> str:
        tail = self._child.tail()
        return f"{NAME} is gone" + (f"; the end of {self._child.log_path}:\n{tail}" if tail else "")
