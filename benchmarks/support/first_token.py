"""When a run's rollout servers sampled their first token, seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from pathlib import Path

from penstock.deploy import ConfigError, RunConnection
from penstock.transfer_queue import QueueError

ANSWER_S = 2.0
SAMPLED = re.compile(r"^penstock_rollout_tokens_total ([\d.e+]+)$", re.MULTILINE)


class FirstToken:
    """`look` again and again while a run starts: it finds the servers by the run's folder and asks for their counts."""

    def __init__(self, connect_env: Path) -> None:
        self._connect_env = connect_env
        self._link: RunConnection | None = None
        self._urls: list[str] = []
        self.sampled = False

    def look(self) -> bool:
        """True once, when a token is seen for the first time."""
        if self.sampled:
            return False
        with contextlib.suppress(OSError, ConfigError, QueueError):  # not there yet
            self._link = self._link or RunConnection.from_lines(self._connect_env.read_text())
            self._urls = self._urls or asyncio.run(_server_urls(self._link))
            self.sampled = any(_tokens(url, self._link.token) for url in self._urls)
        return self.sampled


async def _server_urls(link: RunConnection) -> list[str]:
    """Raises `QueueError`."""
    queue = await link.connect()
    try:
        return [server.url for server in await queue.servers()]
    finally:
        await queue.close()


def _tokens(url: str, token: str) -> float:
    """Raises `OSError`."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - our own server
        found = SAMPLED.search(answer.read().decode())
    return float(found[1]) if found else 0.0
