"""Who serves metrics where: a file per role in ``runs/NAME/metrics/``, gathered into Prometheus' list of targets.

role ──announced──► runs/NAME/metrics/NAME.json ─┐
rollout servers, in the queue's registry ───────┼──► runs/NAME/prometheus-targets.json
sandbox.url ─────────────────────────────────────┘

A role on another machine is found where its runs folder is the same shared one; else it is one more entry by hand.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.transfer_queue import ServerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    """host:port"""
    run: str
    role: str
    name: str
    """Of the process: ``agent-0``."""

    def plain(self) -> dict[str, Any]:
        """An entry of Prometheus' file-based discovery."""
        return {"targets": [self.address], "labels": {"run": self.run, "role": self.role, "name": self.name}}


@contextmanager
def announced(folder: Path, target: Target) -> Iterator[None]:
    """The role's file, taken away when it ends in order. After kill -9 it stays, and Prometheus shows the role down."""
    path = folder / f"{target.name}.json"
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a run whose folder is elsewhere leaves none here
        _replace(path, json.dumps(target.plain()) + "\n")
    except OSError as error:
        logger.info("metrics of %s at %s; not listed in %s: %s", target.name, target.address, folder, error)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def target_list(
    folder: Path, run: str, servers: Sequence[ServerInfo] = (), sandbox_url: str | None = None
) -> list[dict[str, Any]]:
    """All that is known, ordered, each address once."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found += [Target(urlsplit(s.url).netloc, run, "rollout", s.server_id).plain() for s in servers]
    if sandbox_url:
        found.append(Target(urlsplit(sandbox_url).netloc, run, "sandbox", "sandbox").plain())
    return list({entry["targets"][0]: entry for entry in found}.values())


def write_targets(path: Path, targets: Sequence[dict[str, Any]]) -> None:
    """Prometheus reads the file whenever it changes: whole, or not at all."""
    text = json.dumps(targets, indent=2) + "\n"
    if not path.exists() or path.read_text() != text:
        _replace(path, text)


def write_token(path: Path, token: str) -> None:
    """Readable by its owner alone from the first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
