"""Limits of owners of keys, compared with what they have used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.service.calls import CheckpointRecord
from penstock.service.config import Quota
from penstock.trainer.service import BadRequestData
from penstock.transfer_queue import RequestLog


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits, compared with what an owner has used. A request that begins below its limit may end above it."""

    requests: RequestLog
    limits: Mapping[str, Quota] = field(default_factory=dict)

    async def check(self, owner: str, kind: str, models: int = 0) -> None:
        """Raises `BadRequestData` for a request of this kind by an owner who has used up what it needs.

        `models`: the number of the owner's models.
        """
        quota = self.limits.get(owner) or self.limits.get("*")
        if quota is None:
            return
        if kind in ("forward", "sample"):
            _refuse(owner, "tokens", (await self.requests.used(owner)).tokens, quota.tokens)
        elif kind == "optim_step":
            _refuse(owner, "steps", (await self.requests.used(owner)).steps, quota.steps)
        elif kind.startswith("save"):
            records = (await CheckpointRecord.read_all(self.requests)).values()
            stored = sum(one.bytes for one in records if one.owner == owner)
            _refuse(owner, "checkpoint_bytes", stored, quota.checkpoint_bytes)
        elif kind.startswith("create"):
            _refuse(owner, "adapters", models, quota.adapters)


def _refuse(owner: str, name: str, used: int, most: int | None) -> None:
    if most is not None and used >= most:
        raise BadRequestData(f"{owner} has {used:,} of {most:,} {name} (serve.quotas of the service's recipe)")
