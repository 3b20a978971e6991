"""Proof that two machines see the same run's folder."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.run_dir import RunDir

LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Marker:
    """A file that the driver wrote, and what is in it."""

    path: Path
    text: str

    @classmethod
    @contextlib.contextmanager
    def planted(cls, run: RunDir) -> Iterator[Marker]:
        """Lies in the run's folder while the block is open."""
        marker = cls(run.root / "ray.marker", secrets.token_hex(16))
        marker.path.write_text(marker.text)
        try:
            yield marker
        finally:
            marker.path.unlink(missing_ok=True)

    async def look_for(self, within_s: float = 10.0) -> str | None:
        """None once this machine sees it, else what to tell people. A shared disk may show new files late."""
        deadline = time.monotonic() + within_s
        while not self._seen():
            if time.monotonic() >= deadline:
                return (
                    f"machine {socket.gethostname()} does not see {self.path.parent}: metrics and checkpoints are"
                    " written there and read by `penstock run`. Set runs_dir to a folder on a disk they share"
                )
            await asyncio.sleep(LOOK_AGAIN_S)
        return None

    def _seen(self) -> bool:
        try:
            return self.path.read_text() == self.text
        except OSError:
            return False
