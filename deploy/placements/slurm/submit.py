"""Secrets of a run under Slurm, and submission of its scripts.

    runs/NAME/slurm/ (0700)    owner.env  trainer.env  agent.env  rollout.env  sandbox.env  users.acl   (0600)

Each step reads its role's file on its own node. Slurm, command lines and the batch script contain no secret.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.common import write_atomically
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import PASSWORD_VARIABLE, TOKEN_VARIABLE, USER_VARIABLE, redis_login
from penstock.transfer_queue import QueueError
from penstock.transfer_queue.redis import USERS_VERSION, find_redis_server, role_users

OWNER, SANDBOX = "owner", "sandbox"
ROLES = ("trainer", "agent", "rollout")
USERS_FILE = "users.acl"
logger = logging.getLogger("penstock.run")


def write_secrets(folder: Path, config: RunConfig) -> None:
    """Make what is not there yet. An earlier job of the run may wait in the queue: its files stay as they are."""
    if (folder / USERS_FILE).exists():  # written last
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    if config.transfer_queue.url:  # the login in this environment, for every role
        user, password = redis_login()
        logins = dict.fromkeys((OWNER, *ROLES), (user or "", password or ""))
    else:
        owner = ("", secrets.token_urlsafe(32))  # the run's own Redis: its default user is the owner
        logins = {OWNER: owner, **{role: (role, secrets.token_urlsafe(32)) for role in ROLES}}
        if not _has_users():
            logins = dict.fromkeys(logins, owner)
    for role, (user, password) in logins.items():
        _write(folder / f"{role}.env", {USER_VARIABLE: user, PASSWORD_VARIABLE: password, TOKEN_VARIABLE: token})
    _write(folder / f"{SANDBOX}.env", {TOKEN_VARIABLE: token})
    passwords = {role: password for role, (user, password) in logins.items() if user == role}
    users = "".join(f"{line}\n" for line in role_users(config.name, passwords))
    write_atomically(folder / USERS_FILE, users, mode=0o600)


def _has_users() -> bool:
    """True if Redis is 7.0 or newer, which gives each role a user. A submit host without redis-server says nothing of
    the nodes; those that a container brings are new enough."""
    try:
        binary = find_redis_server()
    except QueueError:
        return True
    if binary.version < USERS_VERSION:
        logger.warning("%s is older than 7.0: all roles share one password", binary.path)
    return binary.version >= USERS_VERSION


def _write(path: Path, values: Mapping[str, str]) -> None:
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    write_atomically(path, lines, mode=0o600)


SBATCH_TIMEOUT_S = 60.0


def submit(script: str, path: Path) -> str:
    """Write `script` to `path` and submit it; the job's id. Raises `ConfigError` with what sbatch says."""
    write_atomically(path, script, mode=0o600)
    secrets = (USER_VARIABLE, PASSWORD_VARIABLE, TOKEN_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            env=environment,  # Slurm keeps what it is given until the job ends
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"no sbatch on this machine; {path} is written, submit it where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch {path} did not answer for {SBATCH_TIMEOUT_S:.0f} s; is slurmctld up? (scontrol ping)"
        ) from None
    if done.returncode:
        raise ConfigError(f"sbatch {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
