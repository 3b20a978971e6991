"""How a role finds its run: the ledger's address and the run's name on the command line, secrets in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from penstock.deploy.config import RunConfig
from penstock.deploy.load_config import ConfigError, parse_config
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Limits
from penstock.transfer_queue.redis_ledger import RedisLedger

URL_VARIABLE = "PENSTOCK_LEDGER"
RUN_VARIABLE = "PENSTOCK_RUN"
PASSWORD_VARIABLE = "PENSTOCK_REDIS_PASSWORD"  # noqa: S105 - the variable's name, not a secret
TOKEN_VARIABLE = "PENSTOCK_TOKEN"  # noqa: S105


@dataclass(frozen=True)
class Link:
    """Everything a role needs to join a run from this or another machine."""

    url: str
    run: str
    password: str | None
    token: str

    @classmethod
    def from_environment(cls, url: str | None = None, run: str | None = None) -> Link:
        """Explicit values win over the environment. Raises `ConfigError` naming what is missing."""
        url = url or os.environ.get(URL_VARIABLE)
        run = run or os.environ.get(RUN_VARIABLE)
        token = os.environ.get(TOKEN_VARIABLE)
        for value, mend in (
            (url, f"--ledger or {URL_VARIABLE}"),
            (run, f"--run or {RUN_VARIABLE}"),
            (token, TOKEN_VARIABLE),
        ):
            if not value:
                raise ConfigError(f"{mend} is not set; a living run writes them to runs/NAME/connect.env (source it)")
        return cls(str(url), str(run), os.environ.get(PASSWORD_VARIABLE), str(token))

    def environment(self) -> Mapping[str, str]:
        secrets = {PASSWORD_VARIABLE: self.password or "", TOKEN_VARIABLE: self.token}
        return {URL_VARIABLE: self.url, RUN_VARIABLE: self.run, **secrets}

    async def connect(self, settings: TransferQueueConfig | None = None) -> RedisLedger:
        settings = settings or TransferQueueConfig()
        return await RedisLedger.connect(self.url, run=self.run, config=settings, password=self.password or None)

    async def join(self) -> tuple[RedisLedger, RunConfig]:
        """The ledger and the run's configuration, as `penstock run` stored it there."""
        ledger = await self.connect()
        config = parse_config(yaml.safe_load(await ledger.config()), source=f"the ledger's run {self.run!r}")
        await ledger.close()
        return await self.connect(config.transfer_queue), config


def limits_of(config: RunConfig) -> Limits:
    """What the ledger enforces, from the run's configuration."""
    queue = config.transfer_queue
    return Limits(
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        overage=queue.overage,
        min_group=min(queue.min_group, config.group_size),
        max_attempts=queue.max_attempts,
        lease_ttl_s=queue.lease_ttl_s,
        max_bytes=queue.max_bytes,
        max_groups=queue.max_groups,
        filter_groups=queue.filter_groups,
        max_filtered_steps=queue.max_filtered_steps,
        quotas=queue.quotas,
    )
