"""Which flags a stock server takes: read from its own ``--help``, once per installation, and kept for the next start.

    rollout.vllm_args, rollout.sglang_args ──► merge with ours ──► is each name in --help? ──► command line
                                                                     no: refused, with the nearest name

A server ends at a flag that it does not know, after the half minute of its imports, and names no other. Where its help
cannot be had, nothing is refused here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.common import nearest, private_folder, write_atomically
from penstock.rollout_server.engines.http.drafts import WITHOUT_MODEL, draft_method
from penstock.rollout_server.engines.http.server_process import Installation, Product, inherited_environment
from penstock.rollout_server.protocol import EngineError

logger = logging.getLogger(__name__)
HELP_S = 400.0
"""`--help` imports everything that the server is made of, perhaps on a busy machine."""


async def check_flags(product: Product, installation: Installation, users: Mapping[str, Any]) -> None:
    """Raises `EngineError` that names the setting of a flag which the installed server does not have, or which no
    policy under training can be served with."""
    if not users:
        return
    if reason := unfit_flag(product, users):
        raise EngineError(f"rollout.{product.key}_args.{reason}", retryable=False)
    known = await known_flags(product, installation)
    if known and (unknown := unknown_flag(users, known, product.own_flags)):
        setting = f"rollout.{product.key}_args.{unknown}"
        listed = f"; `{' '.join(product.help_command(installation))}` lists them"
        meant = nearest(_plain(unknown), known) or listed
        raise EngineError(
            f"{setting}: {product.title} {installation.version} in {installation.python} has no such flag{meant}",
            retryable=False,
        )


def unfit_flag(product: Product, users: Mapping[str, Any]) -> str:
    """The first setting under which weights or logprobs would be others than the trainer's, with reason and fix."""
    method = draft_method(users)
    for name, value in users.items():
        flag = _plain(name)
        if flag.startswith("speculative") and value not in (None, False) and method not in WITHOUT_MODEL:
            return (
                f"{name}: drafts of a model are refused: its weights stay as they were while the policy's change. "
                f"Choose {' or '.join(WITHOUT_MODEL)}, which copy from the text, or remove it"
            )
        if flag == "quantization" and value not in (None, *product.requantises):
            methods = " or ".join(product.requantises)
            can = f"can quantise at an update under {methods} alone" if methods else "cannot quantise at an update"
            return f"{name}={value}: versions have the model's own tensors, which {product.title} {can}. Remove it"
    return ""


def unknown_flag(users: Mapping[str, Any], known: Iterable[str], own: Container[str] = ()) -> str:
    """The first name that is none; empty where all are. ``compilation_config.mode`` is a part of a flag's value.

    A server takes the beginning of a name, as SGLang's ``tp``, where one flag alone begins so. Those of `own`, which
    the adapter sets, are not reached in this way.
    """
    names = set(known)
    for name in users:
        if (flag := _plain(name)) not in names:
            meant = [one for one in names if one.startswith(flag)]
            if len(meant) != 1 or meant[0] in own:
                return name
    return ""


async def known_flags(product: Product, installation: Installation) -> frozenset[str]:
    """Names without dashes in front, words joined by dashes; empty if they are not available."""
    command = product.help_command(installation)
    digest = hashlib.sha256(f"{installation.version} {' '.join(command)}".encode()).hexdigest()[:16]
    file = _cache_folder() / f"flags-{product.key}-{digest}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return frozenset(json.loads(_read_own(file)))
    flags = flags_in(await _help(command))
    if len(flags) < 20:  # the text of an error
        logger.warning("%s does not say which flags it takes; they are not checked", " ".join(command))
        return frozenset()
    with contextlib.suppress(OSError):
        if file.is_absolute():
            private_folder(file.parent)
            write_atomically(file, json.dumps(sorted(flags)), mode=0o600)
    return flags


def flags_in(text: str) -> frozenset[str]:
    return frozenset(_plain(name) for name in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text))


async def _help(command: Sequence[str]) -> str:
    """Empty if it fails, or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=inherited_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(HELP_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace")


def _plain(name: str) -> str:
    return name.partition(".")[0].replace("_", "-")


def _read_own(path: Path) -> bytes:
    """Raises `OSError`, also where another user could have written the file: then it is not read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        return file.read()


def _cache_folder() -> Path:
    """This user's; not absolute if there is none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "penstock"
