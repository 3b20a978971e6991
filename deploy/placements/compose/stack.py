"""A *stack*: the folder that `docker compose up` runs in. Made whole or not at all.

compose.yaml  prometheus.yaml  sandbox-seccomp.json     from here; yours to change
gpu.yaml                                                where GPUs were named
.env                                                    what compose.yaml leaves open; no secret
secrets/                                                0700, a file per login, 0600
models/  runs/  logs/  redis/  prometheus/              what you put in, what the run leaves
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.load_config import ConfigError, load_config
from penstock.deploy.placements.compose.gpus import gpu_file
from penstock.deploy.placements.compose.logins import make_secrets, own, write_secrets

FILES = Path(__file__).parent / "files"
SOURCE = Path(__file__).resolve().parents[2]
FOLDERS = ("models", "runs", "logs", "redis", "prometheus")
IMAGE_USER = 10001
"""Who the images run as; also here where root makes the stack, because no container is to be root."""
ENGINE_PYTHON = {"vllm": "rollout.vllm_python", "sglang": "rollout.sglang_python"}


@dataclass(frozen=True)
class Stack:
    """What a person decides."""

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
    (folder / ".env").write_text(_env_file(_settings(stack, config, uid, gid, gpus=gpus)))


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
        "PENSTOCK_UID": str(uid),
        "PENSTOCK_GID": str(gid),
        # images are built of a checkout; a Penstock that pip installed runs images that are there
        **({"PENSTOCK_SOURCE": str(SOURCE)} if (SOURCE / "pyproject.toml").is_file() else {}),
    }


def _env_file(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={_quoted(name, value)}\n" for name, value in settings.items())


def _quoted(name: str, value: str) -> str:
    """Compose and its predecessors read the same in double quotes, but for what they would take for a variable."""
    if set(value) & set("$`\n"):
        raise ConfigError(f"{name}: {value!r} has a $, a backquote or a line end, which compose's .env cannot hold")
    if re.fullmatch(r"[\w./:=,@+-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_paths(config: RunConfig, recipe: Path) -> None:
    """What lies on this machine is seen in the containers where it lies in the recipe's folder."""
    root = recipe.parent.resolve()
    named = {
        "model": config.model,
        "data.train": config.data.train,
        "data.eval": config.data.eval or "",
        "agent.loop": config.agent.loop,
        "agent.reward": config.agent.reward,
    }
    for key, value in named.items():
        path = Path(value.partition(":")[0])
        if path.is_absolute() and path.exists() and root not in path.parents:
            raise ConfigError(
                f"{key}: {path} lies outside of {root}, the only folder of the recipe that containers see, as"
                " /work/recipes. Put it there; or put a model into the stack's models/ and say model=/work/models/NAME"
            )
