"""Labels that name the owner of a container or a snapshot's image, and removal of what a killed process left.

A box ends by itself when its worker dies, and the engine removes it then. What can stay is a container whose worker was
killed between its creation and its start, or that the engine lost while it was down itself; and every image that a box
was copied into, since no process holds those.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.sandbox.docker.container import remove
from penstock.sandbox.docker.engine import calling, connect
from penstock.sandbox.owner import is_gone, machine, this_process

if TYPE_CHECKING:
    from aiodocker import Docker


PREFIX = "penstock."
SNAPSHOT, MAKER = PREFIX + "snapshot", PREFIX + "maker"
"""On images that boxes were copied into, in addition to the labels of the box: which copy it is, and which maker's."""
_GONE, _IN_USE = 404, 409


@dataclass(frozen=True, slots=True)
class RemovedCounts:
    """The numbers of removed containers and images."""

    containers: int
    images: int


def labels_of(owner: str, label: str, session_id: str) -> dict[str, str]:
    facts = {
        "owner": owner,
        "label": label[:256],
        "session": session_id,
        "machine": machine(),
        "process": this_process(),
    }
    return {PREFIX + name: value for name, value in facts.items()}


async def clear_away(client: Docker, owner: str | None) -> RemovedCounts:
    """Removes what processes that are gone left, of `owner` (None: of all). Raises `SandboxError`."""
    whose = PREFIX + "owner" if owner is None else f"{PREFIX}owner={owner}"
    async with calling("looking for containers that a killed process left"):
        entries = await client.containers.list(all=True, filters={"label": [whose]})
    containers = [container for container in entries if is_abandoned(container._container, time.time())]
    for container in containers:
        await remove(client, container.id)
    images = await snapshot_images(client, whose)
    abandoned = {listed["Id"] for listed in images if image_is_abandoned(listed, time.time())}
    return RemovedCounts(len(containers), await remove_images(client, images, abandoned))


async def clear_away_dead_processes() -> RemovedCounts:
    """Whichever run's. Raises `SandboxError`."""
    client = connect()
    try:
        return await clear_away(client, None)
    finally:
        await client.close()


async def snapshot_images(client: Docker, label: str) -> list[dict[str, Any]]:
    """The engine's entries of images that boxes were copied into and that have `label`."""
    async with calling("looking for images of snapshots"):
        images = await client.images.list(filters={"label": [SNAPSHOT, label]}, all="true")
    return list(images)


async def remove_images(client: Docker, listed: list[dict[str, Any]], image_ids: Collection[str]) -> int:
    """Remove the images of `listed` with `image_ids` that no box and no other image is made of. Returns their number.

    Raises `SandboxError`.
    """
    remaining = listed
    while True:
        parents = {image.get("ParentId") for image in remaining}  # an image goes after those that are made of it
        candidates = [image["Id"] for image in remaining if image["Id"] in image_ids and image["Id"] not in parents]
        removed = {image_id for image_id in candidates if await _removed(client, image_id)}
        remaining = [image for image in remaining if image["Id"] not in removed]
        if not removed:
            return len(listed) - len(remaining)


async def _removed(client: Docker, image_id: str) -> bool:
    import aiodocker

    async with calling(f"removing image {image_id[:19]} of a snapshot"):
        try:
            await client.images.delete(image_id, force=True)
        except aiodocker.DockerError as error:
            if error.status == _IN_USE:
                return False
            if error.status != _GONE:
                raise
    return True


def is_abandoned(listed: dict[str, Any], now: float) -> bool:
    """`listed`: the engine's entry of a container (State, Created in seconds, Labels)."""
    gone = _process_is_gone(listed)
    if gone is None:
        # Another machine's process cannot be looked at: its container is abandoned if it does not run at that age.
        return listed.get("State") != "running" and now - listed.get("Created", now) > 600.0
    return gone


def image_is_abandoned(listed: dict[str, Any], now: float) -> bool:
    """`listed`: the engine's entry of an image (Created in seconds, Labels)."""
    gone = _process_is_gone(listed)
    # No episode needs an image for longer than a day.
    return now - listed.get("Created", now) > (24 * 3600.0) if gone is None else gone


def _process_is_gone(listed: dict[str, Any]) -> bool | None:
    """None if it is another machine's."""
    labels = listed.get("Labels") or {}
    if labels.get(PREFIX + "machine") != machine():
        return None
    return is_gone(labels.get(PREFIX + "process", ""))
