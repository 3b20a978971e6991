"""A stack: the folder that `docker compose up` runs in. Written completely or not at all.

    compose.yaml  prometheus.yaml  sandbox-seccomp.json     from this package; yours to edit
    gpu.yaml                                                if GPUs were named
    .env                                                    what compose.yaml leaves open; no secret
    secrets/                                                0700, a file per login, 0600
    models/  runs/  logs/  redis/  prometheus/              inputs and outputs of the run

Compose gives every copy of a service the same devices, so `--scale` cannot spread servers over GPUs: in gpu.yaml each
server with its own GPUs is a separate service.

| secret | service | contents |
|---|---|---|
| owner_login, rollout_login, agent_login | head; rollout; agent | the token, a user of the queue |
| watch_login | exporter; the queue's health check | the same |
| page_login | page | the same as an agent, and a read-only token |
| sandbox_login, token | sandbox; Prometheus and you | the token |
| redis_users | redis | the users, with hashes of their passwords |
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.config import RunConfig, load_config
from penstock.deploy.preflight.stop_grace import CONTAINER_S, head_grace_s
from penstock.deploy.preflight.turns import refuse_elsewhere
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import PASSWORD_VARIABLE, TOKEN_VARIABLE, USER_VARIABLE, VIEW_TOKEN_VARIABLE
from penstock.transfer_queue.redis import user_rules

HEADER = "# Which NVIDIA GPUs each service has, by their numbers in nvidia-smi. Needs the NVIDIA container toolkit.\n"


def gpu_file(compose: Path, trainer: str, rollouts: Sequence[str]) -> str:
    """The override file: `trainer`'s and each server's GPUs as in ``0,1``. Raises `ConfigError` for one given twice."""
    groups = [_numbers(group) for group in (trainer, *rollouts)]
    gpus = [number for group in groups for number in group]
    if twice := sorted({number for number in gpus if gpus.count(number) > 1}):
        raise ConfigError(f"GPU {', '.join(twice)} is given twice: trainer {trainer!r}, rollouts {list(rollouts)}")
    rollout = yaml.safe_load(compose.read_text())["services"]["rollout"]
    services: dict[str, Any] = {"head": _reservation(groups[0])}
    for number, devices in enumerate(groups[1:]):
        # The first is the service that is there already; the others answer to its name, where Prometheus looks for it.
        # Each is a copy: YAML aliases between services would say that they are one.
        networks = {name: {"aliases": ["rollout"]} for name in rollout["networks"]}
        another = {**copy.deepcopy(rollout), "networks": networks} if number else {}
        services[f"rollout-{number}" if number else "rollout"] = {**another, **_reservation(devices)}
    return HEADER + yaml.safe_dump({"services": services}, sort_keys=False, width=200)


def _numbers(group: str) -> list[str]:
    numbers = [number.strip() for number in group.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"GPUs {group!r}: write their numbers as 0,1")
    return numbers


def _reservation(devices: Sequence[str]) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": list(devices), "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


USERS = ("owner", "agent", "rollout", "watch")


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
        # Redis's own user would need no password.
        "redis_users": "\n".join(["user default off resetpass resetkeys resetchannels -@all", *lines, ""]),
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
    """Return export lines for a shell, which `probe` reads too. What `token_urlsafe` makes and names of runs need no
    quotes.
    """
    return "".join(f"export {name}={value}\n" for name, value in values.items())


FILES = Path(__file__).parent / "files"
SOURCE = Path(__file__).resolve().parents[3]
FOLDERS = ("models", "runs", "logs", "redis", "prometheus")
IMAGE_USER = 10001
"""User id of the images, also if root makes the stack: no container runs as root."""
ENGINE_PYTHON = {"vllm": "rollout.vllm_python", "sglang": "rollout.sglang_python"}


@dataclass(frozen=True)
class Stack:
    """The choices of a person: folder, recipe, overrides and GPUs."""

    folder: Path
    recipe: Path
    overrides: Sequence[str] = ()
    trainer_gpus: str | None = None
    rollout_gpus: Sequence[str] = ()
    """One entry per rollout server."""


def make_stack(stack: Stack) -> RunConfig:
    """Write the folder; the recipe as it was checked is returned.

    Raises `ConfigError`: the recipe is wrong, or names what containers will not see; the folder holds something.
    """
    config = load_config(stack.recipe, stack.overrides)
    refuse_elsewhere(config, "Compose")
    _check_paths(config, stack.recipe)
    if stack.folder.exists() and any(stack.folder.iterdir()):
        raise ConfigError(f"{stack.folder} is not empty: a stack's secrets and queue belong to one run; name another")
    stack.folder.parent.mkdir(parents=True, exist_ok=True)
    # killed half-way it leaves a folder of another name, and the next try is not hindered
    half = Path(tempfile.mkdtemp(prefix=f".{stack.folder.name}-", dir=stack.folder.parent))
    try:
        _fill(half, stack, config)
        half.rename(stack.folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return config


def _fill(folder: Path, stack: Stack, config: RunConfig) -> None:
    uid, gid = (os.geteuid(), os.getegid()) if os.geteuid() else (IMAGE_USER, IMAGE_USER)
    for file in FILES.iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in FOLDERS:
        (folder / name).mkdir(mode=0o700)
        own(folder / name, uid, gid)
    gpus = stack.trainer_gpus is not None
    if gpus:
        text = gpu_file(folder / "compose.yaml", stack.trainer_gpus or "", stack.rollout_gpus)
        (folder / "gpu.yaml").write_text(text)
    write_secrets(folder / "secrets", make_secrets(config.name), uid, gid)
    settings = _settings(stack, config, uid, gid, gpus=gpus)
    lines = []
    for name, value in settings.items():
        # Compose and its predecessors read the same in double quotes, but for what they would take for a variable.
        if set(value) & set("$`\n"):
            raise ConfigError(f"{name}: {value!r} has a $, a backquote or a line end, which compose's .env cannot hold")
        is_plain = re.fullmatch(r"[\w./:=,@+-]*", value)
        text = value if is_plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines.append(f"{name}={text}\n")
    (folder / ".env").write_text("".join(lines))


def _settings(stack: Stack, config: RunConfig, uid: int, gid: int, *, gpus: bool) -> dict[str, str]:
    engine = config.rollout.engine
    python = [f"{ENGINE_PYTHON[engine]}=/usr/local/bin/engine-python"] if engine in ENGINE_PYTHON else []
    return {
        "COMPOSE_PROJECT_NAME": "penstock-" + re.sub(r"[^a-z0-9_-]", "-", config.name.lower()),
        "COMPOSE_FILE": "compose.yaml:gpu.yaml" if gpus else "compose.yaml",
        "PENSTOCK_RUN": config.name,
        "PENSTOCK_RECIPES": str(stack.recipe.parent.resolve()),
        "PENSTOCK_RECIPE": stack.recipe.name,
        "PENSTOCK_OVERRIDES": shlex.join([*python, *stack.overrides]),
        "PENSTOCK_ENGINE": engine,
        "PENSTOCK_STOP_GRACE_S": str(head_grace_s(config, CONTAINER_S)),
        "PENSTOCK_UID": str(uid),
        "PENSTOCK_GID": str(gid),
        # images are built of a checkout; a Penstock that pip installed runs images that are there
        **({"PENSTOCK_SOURCE": str(SOURCE)} if (SOURCE / "pyproject.toml").is_file() else {}),
    }


def _check_paths(config: RunConfig, recipe: Path) -> None:
    """Check that the paths of the recipe lie in its folder, which containers see. Raises `ConfigError`."""
    root = recipe.parent.resolve()
    named = [
        ("model", config.model),
        ("data.train", config.data.train),
        ("data.eval", config.data.eval or ""),
        *(("agent.loop", loop) for loop in config.agent.loops),
        ("agent.reward", config.agent.reward),
    ]
    for key, value in named:
        path = Path(value.partition(":")[0])
        if path.is_absolute() and path.exists() and root not in path.parents:
            raise ConfigError(
                f"{key}: {path} lies outside of {root}, the only folder of the recipe that containers see, as"
                " /work/recipes. Put it there; or put a model into the stack's models/ and say model=/work/models/NAME"
            )
