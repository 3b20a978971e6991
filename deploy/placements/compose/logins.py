"""What each service of a stack is told and nobody else: files for `secrets/`, their passwords made here.

| file | service | holds |
|---|---|---|
| owner_login, rollout_login, agent_login | head; rollout; agent | the token, a user of the queue |
| watch_login | exporter; the queue's health check | the same |
| page_login | page | the same as an agent, and a token that only looks |
| sandbox_login, token | sandbox; Prometheus and you | the token |
| redis_users | redis | the users, by hashes of their passwords |
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from penstock.deploy.commands.dashboard import VIEW_TOKEN_VARIABLE
from penstock.deploy.link import PASSWORD_VARIABLE, TOKEN_VARIABLE, USER_VARIABLE
from penstock.transfer_queue.redis import user_rules

USERS = ("owner", "agent", "rollout", "watch")
NOBODY = "user default off resetpass resetkeys resetchannels -@all"
"""Redis's own user, who would need no password."""


def make_secrets(run: str) -> dict[str, str]:
    """File name → content, new at every call. Raises `QueueError` for a run's name that Redis's rules cannot hold."""
    token, view_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    passwords = {role: secrets.token_urlsafe(32) for role in USERS}
    shared = {TOKEN_VARIABLE: token}
    users = {role: {USER_VARIABLE: f"{run}-{role}", PASSWORD_VARIABLE: passwords[role]} for role in USERS}
    logins = {f"{role}_login": _exports({**shared, **users[role]}) for role in USERS}
    lines = [f"user {run}-{role} {user_rules(run, role, password)}" for role, password in passwords.items()]
    return {
        **logins,
        "page_login": _exports({**shared, **users["agent"], VIEW_TOKEN_VARIABLE: view_token}),
        "sandbox_login": _exports(shared),
        "token": token,
        "redis_users": "\n".join([NOBODY, *lines, ""]),
    }


def write_secrets(folder: Path, contents: Mapping[str, str], uid: int, gid: int) -> None:
    """Into a new folder that the containers' user alone may read, before there is anything in it to read."""
    folder.mkdir(mode=0o700)
    for name, content in contents.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            own(descriptor, uid, gid)
            file.write(content)
    own(folder, uid, gid)


def own(path: Path | int, uid: int, gid: int) -> None:
    """Give `path` to the containers' user. Only root may, and only root has to: else that user is this one."""
    if os.geteuid() == 0:
        os.chown(path, uid, gid)


def _exports(values: Mapping[str, str]) -> str:
    """For a shell, and read by `probe` too. What `token_urlsafe` makes and names of runs need no quotes."""
    return "".join(f"export {name}={value}\n" for name, value in values.items())
