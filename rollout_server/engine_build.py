"""One build of one engine in a run: two would sample the tokens of one step by two programs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock.rollout_server.protocol import EngineError, EngineInfo
from penstock.rollout_server.registration import QueueConnection
from penstock.transfer_queue import QueueError, ServerInfo

logger = logging.getLogger(__name__)
SETTING_OF_BUILD = {"vllm": "rollout.vllm_python", "sglang": "rollout.sglang_python"}
"""What chooses the environment that an engine is in; others are in this process's own."""


def build_of(info: EngineInfo) -> str:
    """Name and version, as the registry has them."""
    return f"{info.name} {info.engine_version}"


class BuildCheck:
    """Of one server. Whichever comes later is refused, before it has its first request."""

    def __init__(self, connection: QueueConnection, name: str) -> None:
        self._connection, self._name = connection, name
        self._alike: EngineInfo | None = None

    async def compare(self, info: EngineInfo) -> None:
        """Once per engine; again at the next call where the queue is away. Raises `EngineError` where another server of
        the run has another build."""
        if info is self._alike:
            return
        try:
            others = await self._connection.ask(self._connection.queue.servers())
        except QueueError as error:
            logger.warning("engines of other servers are not compared: %s", error)
            return
        self._refuse_other(info, others)
        self._alike = info

    def _refuse_other(self, info: EngineInfo, servers: Iterable[ServerInfo]) -> None:
        mine, name = build_of(info), self._name
        if other := next((one for one in servers if one.server_id != name and one.engine not in ("", mine)), None):
            raise EngineError(
                f"{SETTING_OF_BUILD.get(info.name, 'rollout.engine')}: the engine of {name} is {mine}, and"
                f" {other.server_id} at {other.url} has {other.engine}: tokens of one step would be sampled by two"
                f" builds. Install {other.engine} for this server, or stop {other.server_id} first"
            )
