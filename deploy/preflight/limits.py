"""What the operating system grants a process, against what the busiest role takes."""

from __future__ import annotations

import resource

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, warning
from penstock.deploy.preflight.resources import cores

BASE_FILES = 256
"""Libraries, logs, the queue's connections (64 at most), the model's files."""
FILES_PER_EPISODE = 6
"""A box's sockets and pipes, a request, a tool's connection."""
FILES_PER_REQUEST = 2
"""On a server: the client's connection and the engine's."""
QUEUE = 5
"""Requests in a server per slot: one is decoded, four wait."""


def check_open_files(config: RunConfig) -> Check:
    """Roles raise the soft limit themselves; the hard one is what counts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    worker = config.agent.concurrency * FILES_PER_EPISODE if config.agent.workers else 0
    server = config.rollout.max_concurrent * QUEUE * FILES_PER_REQUEST if config.rollout.servers else 0
    needed = BASE_FILES + max(worker, server)
    granted = "any number of" if hard == resource.RLIM_INFINITY else hard
    return Check(
        "open files",
        hard == resource.RLIM_INFINITY or hard >= needed,
        f"a role may open {granted} files, the busiest needs about {needed}",
        f"`ulimit -Hn {needed}` before the run (limits.conf, LimitNOFILE= or --ulimit nofile={needed}), or lower"
        " agent.concurrency and rollout.max_concurrent",
    )


def check_threads(config: RunConfig) -> Check | None:
    rollout, trainer, have = config.rollout, config.trainer, cores()
    if not rollout.servers and not trainer.ranks:
        return None
    wanted = {"rollout.threads": rollout.threads if rollout.servers else 0, "trainer.threads": trainer.threads}
    key, most = max(wanted.items(), key=lambda item: item[1])
    servers, ranks = f"{rollout.servers} servers of {rollout.threads}", f"{trainer.ranks} ranks of {trainer.threads}"
    found = f"{have} cores; threads: {servers}, {ranks}"
    if most > have:
        return Check(
            "threads", False, found, f"set {key}={have:g} or less: threads that share a core wait for each other"
        )
    if rollout.servers * rollout.threads + trainer.ranks * trainer.threads > have:
        return warning("threads", found, "fewer servers, ranks or threads: together they ask for more than there is")
    return Check("threads", True, found)
