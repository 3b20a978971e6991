"""Which processes a run has, said once for every place where they may run: this machine, or nodes of a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.deploy.config import RunConfig
from penstock.deploy.link import Link
from penstock.deploy.processes import RoleSpec
from penstock.deploy.roles import TRAINER_STOP_S
from penstock.deploy.run_dir import RunDir

Kind = Literal["rollout", "agent", "trainer", "dashboard"]
PAGE_RESTARTS = 3
_SETTINGS = {
    "PENSTOCK_SUPERVISED": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Role:
    """One process of a run, before it is known where it runs."""

    name: str
    kind: Kind
    words: tuple[str, ...]
    """Of the `penstock` command line, secrets never among them."""
    env: Mapping[str, str] = field(repr=False)
    """Added to the environment of the machine where it runs; this role's secrets are here."""
    max_restarts: int
    stop_grace_s: float = 15.0
    number: int | None = None
    """Its place among those of its kind that may be added and removed; None: it is the only one."""

    def spec(self, logs: Path, cwd: Path | None = None) -> RoleSpec:
        """How this machine starts it: this Python, this environment, and what is the role's own."""
        argv = [sys.executable, "-m", "penstock.deploy.cli", *self.words]
        env = {**os.environ, **self.env}
        return RoleSpec(self.name, argv, env, logs / f"{self.name}.log", self.max_restarts, self.stop_grace_s, cwd)


def roles_of(config: RunConfig, link: Link) -> list[Role]:
    """The run's processes as its recipe counts them, the trainer last."""
    rollouts = [rollout_role(config, link, number) for number in range(config.rollout.servers)]
    if config.rollout.evaluation_server:
        port = _port(config, config.rollout.servers)
        words = ("rollout", "--name", "rollout-eval", "--port", port, "--evaluates")
        rollouts.append(_role(link, "rollout-eval", "rollout", *words, max_restarts=config.rollout.max_restarts))
    agents = [agent_role(config, link, number) for number in range(config.agent.workers)]
    restarts = config.trainer.max_restarts
    trainer = _role(link, "trainer", "trainer", "train", max_restarts=restarts, stop_grace_s=TRAINER_STOP_S + 15)
    return [*rollouts, *agents, trainer]


def rollout_role(config: RunConfig, link: Link, number: int) -> Role:
    name = f"rollout-{number}"
    words = ("rollout", "--name", name, "--port", _port(config, number))
    return _role(link, name, "rollout", *words, max_restarts=config.rollout.max_restarts, number=number)


def agent_role(config: RunConfig, link: Link, number: int) -> Role:
    name = f"agent-{number}"
    return _role(link, name, "agent", "agent", "--name", name, max_restarts=config.agent.max_restarts, number=number)


def page_roles(config: RunConfig, run: RunDir, link: Link) -> list[Role]:
    """The page beside the run, where it is configured. An agent's rights are enough to queue dead letters again."""
    page = config.dashboard
    if not page.enabled:
        return []
    words = ("dashboard", str(run.root.parent), "--host", page.host, "--port", str(page.port))
    return [_role(link, "dashboard", "dashboard", *words, rights="agent", max_restarts=PAGE_RESTARTS)]


def _port(config: RunConfig, server: int) -> str:
    return str(config.rollout.port and config.rollout.port + server)


def _role(
    link: Link,
    name: str,
    kind: Kind,
    *words: str,
    rights: str = "",
    max_restarts: int,
    stop_grace_s: float = 15.0,
    number: int | None = None,
) -> Role:
    own = link.of_role(rights or kind)
    return Role(name, kind, words, {**own.environment(), **_SETTINGS}, max_restarts, stop_grace_s, number)


ADDED = {"rollout": rollout_role, "agent": agent_role}
"""Kinds of which there may be more and fewer while a run goes on, and how one is made."""

__all__ = ["ADDED", "Kind", "Role", "agent_role", "page_roles", "roles_of", "rollout_role"]
