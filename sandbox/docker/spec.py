"""The create call of a container: all of its containment in one place."""

from __future__ import annotations

import shlex
from typing import Any

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.docker.engine import DockerEngine, DockerImage
from penstock.sandbox.inside.children import LOCKED_BYTES, NO_CORE, OPEN_FILES
from penstock.sandbox.limited import shared_folders
from penstock.sandbox.protocol import ENTRYPOINT_VARIABLE, OWN_ROOT_CAPABILITIES, WORKDIR_VARIABLE
from penstock.sandbox.uids import UidBlocks

UID_BASE = 1_895_825_408
"""Right above the range of bubblewrap's boxes."""
_UIDS = UidBlocks(UID_BASE, 1024, 16384)
_FIRST_REMAPPED_UID = 20_000
_REMAPPED_UIDS = UidBlocks(_FIRST_REMAPPED_UID, 64, 703)
"""Number of uids of an engine that remaps them."""


def container_spec(
    config: SandboxConfig,
    engine: DockerEngine,
    image: DockerImage,
    command: list[str],
    *,
    slot: int,
    labels: dict[str, str],
    own_root: bool = False,
) -> dict[str, Any]:
    """Body of the engine's create call for a box whose first process is `command`."""
    uid = 0 if own_root else uid_of(slot, engine.remaps_uids)
    environment, host = ["HOME=/tmp", "LANG=C.UTF-8"], _host_config(config, image, uid)
    if own_root:  # the image's file system to write; what is written has no limit here: `Container` watches it
        capabilities = list(OWN_ROOT_CAPABILITIES)
        host |= {
            "ReadonlyRootfs": False,
            "CapAdd": capabilities,
            "Tmpfs": dict.fromkeys(image.volumes, _tmpfs(config, 0)),
        }
        entrypoint = shlex.join(image.entrypoint)
        environment = [f"{WORKDIR_VARIABLE}={image.workdir}", f"{ENTRYPOINT_VARIABLE}={entrypoint}"]
    return {
        "Image": image.image_id,
        "Entrypoint": command[:1],
        "Cmd": command[1:],
        "User": f"{uid}:{uid}",
        "WorkingDir": "/tmp",  # noqa: S108 - the box's own
        "Env": environment,
        "Hostname": "sandbox",
        "Labels": labels,
        "Healthcheck": {"Test": ["NONE"]},  # an image's own would run its code in the box
        "NetworkDisabled": True,
        # the engine closes stdin when the one attached connection is gone: that ends the box of a killed worker
        **{"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "OpenStdin": True, "StdinOnce": True},
        "HostConfig": host,
    }


def _host_config(config: SandboxConfig, image: DockerImage, uid: int) -> dict[str, Any]:
    memory_bytes = config.memory_mb << 20
    host: dict[str, Any] = {
        "AutoRemove": True,
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "IpcMode": "private",
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        "PidsLimit": config.pids,
        "NanoCpus": int(config.cpus * 1e9),
        "ShmSize": 16 << 20,
        "Tmpfs": dict.fromkeys(("/tmp", *image.volumes), _tmpfs(config, uid)),  # noqa: S108 - the box's own
        "Ulimits": [_limit("core", NO_CORE), _limit("nofile", OPEN_FILES), _limit("memlock", LOCKED_BYTES)],
        "LogConfig": {"Type": "none", "Config": {}},
    }
    if config.folders:
        # without what is mounted below a folder, which would be writable
        mount = {"Type": "bind", "ReadOnly": True, "BindOptions": {"NonRecursive": True}}
        host["Mounts"] = [{**mount, "Source": here, "Target": path} for path, here in shared_folders(config).items()]
    if config.runtime is not None:
        host["Runtime"] = config.runtime
    return host


def _tmpfs(config: SandboxConfig, uid: int) -> str:
    """`exec` is explicit: the engine's default is noexec, and code builds programs in /tmp.

    The box owns it: some runtimes keep the mode that the folder has in the image, whatever `mode` says.
    """
    return f"rw,exec,nosuid,nodev,mode=1777,uid={uid},gid={uid},size={config.tmp_mb << 20}"


def _limit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def keeper_of(remaps_uids: bool) -> str:
    """User of first processes that only keep a container open: no box has this uid."""
    uid = (_FIRST_REMAPPED_UID if remaps_uids else UID_BASE) - 1
    return f"{uid}:{uid}"


def uid_of(slot: int, remaps_uids: bool) -> int:
    """A uid that no other box on this machine has at this time. Raises `SandboxError` where all are taken."""
    return (_REMAPPED_UIDS if remaps_uids else _UIDS).uid(slot)
