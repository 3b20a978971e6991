"""What the routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.server.metrics import Metrics
from penstock.sandbox.server.pool import BoxPool
from penstock.sandbox.server.quota import Quotas
from penstock.sandbox.server.relay import Relays
from penstock.sandbox.server.sessions import Sessions
from penstock.sandbox.server_config import DEFAULT_IMAGE


@dataclass(frozen=True, slots=True)
class Parts:
    config: SandboxConfig
    sandbox: Sandbox
    pool: BoxPool
    quotas: Quotas
    sessions: Sessions
    metrics: Metrics
    relays: Relays = field(default_factory=Relays)

    @classmethod
    def of(cls, sandbox: Sandbox, config: SandboxConfig) -> Parts:
        targets = {None if image == DEFAULT_IMAGE else image: n for image, n in config.server.warm.items()}
        pool, quotas, metrics = BoxPool(sandbox, config.max_boxes, targets), Quotas(), Metrics()
        return cls(config, sandbox, pool, quotas, Sessions(pool, quotas, metrics), metrics)

    def usual_image(self, image: str | None) -> str | None:
        """None where `image` is the default one, by whatever name: one warm pool serves both."""
        return None if image in (DEFAULT_IMAGE, default_image(self.config)) else image

    async def stop(self) -> None:
        """Every box is gone afterwards."""
        await self.relays.stop()
        await self.sessions.end_all()
        await self.pool.stop()
        await self.sandbox.close()

    def measure(self) -> None:
        """Bring the gauges up to now."""
        self.metrics.boxes.labels("given_out").set(len(self.sessions.entries))
        self.metrics.boxes.labels("warm").set(self.pool.warm)
        self.metrics.waiting.set(self.pool.slots.waiting)
        self.metrics.count_boxes(self.pool.counts)


def default_image(config: SandboxConfig) -> str:
    """By its own name; a backend without images has the machine's own system."""
    image: str = getattr(config, "image", "host") if config.backend == "docker" else "host"
    return image


async def parts_of(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts
