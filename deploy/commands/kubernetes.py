"""`penstock kubernetes`: what the Helm chart in deploy/placements/kubernetes cannot make itself."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import yaml

from penstock.deploy.commands.shared import user_errors
from penstock.deploy.run.connection import PASSWORD_VARIABLE, TOKEN_VARIABLE, USER_VARIABLE, VIEW_TOKEN_VARIABLE
from penstock.transfer_queue import QueueError
from penstock.transfer_queue.redis import user_rules

app = typer.Typer(help="A run on Kubernetes, from a Helm chart.", no_args_is_help=True)
LOGINS = {"head": "owner", "rollout": "rollout", "agent": "agent", "page": "agent"}
"""Pods → whose rights they have in the queue. Sandboxes have no part in it."""


@app.callback()
def group() -> None:
    """A run on Kubernetes, from a Helm chart; the page "Launching" has the steps."""


@app.command("secrets")
def print_secrets(
    run: Annotated[str, typer.Argument(help="The run's name, as the chart's value `run`.")],
    release: Annotated[str, typer.Option(help="Name of the Helm release.")] = "penstock",
) -> None:
    """Print the Secrets of a run as YAML, new passwords at every call; nothing of them is kept here.

    Example: penstock kubernetes secrets mine --release mine | kubectl --namespace training apply -f -
    """
    with user_errors(QueueError):
        manifests = list(secrets_of(run, release))
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False, width=1000), nl=False)


def secrets_of(run: str, release: str) -> Iterator[dict[str, Any]]:
    """One Secret with Redis's users (hashes of passwords only), and one login per kind of pod.

    Raises `QueueError` for a run's name that could reach over its keys.
    """
    token, view_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    passwords = {role: secrets.token_urlsafe(32) for role in dict.fromkeys(LOGINS.values())}
    users = [f"user {run}-{role} {user_rules(run, role, password)}" for role, password in passwords.items()]
    # Redis's own user would need no password; the kubelet's may ask whether Redis answers.
    everybody = ("user default off resetpass resetkeys resetchannels -@all", "user probe on nopass -@all +ping")
    yield _secret(release, "redis-users", {"users.acl": "\n".join([*everybody, *users, ""])})
    for pod, role in LOGINS.items():
        login = {USER_VARIABLE: f"{run}-{role}", PASSWORD_VARIABLE: passwords[role], TOKEN_VARIABLE: token}
        view = {VIEW_TOKEN_VARIABLE: view_token} if pod == "page" else {}
        yield _secret(release, f"login-{pod}", {**login, **view})
    yield _secret(release, "login-sandbox", {TOKEN_VARIABLE: token})


def _secret(release: str, name: str, values: dict[str, str]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": release}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{release}-{name}", "labels": labels},
        "type": "Opaque",
        "stringData": values,
    }
