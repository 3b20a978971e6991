"""Images that boxes with a root of their own are copied into (`docker commit`), and their end.

    box ──commit──► image ──► boxes of it ──commit──► image ──► …

An image has what the box wrote to its image's file system, /tmp among it: such a box has no /tmp in memory. It
lacks what runs, /dev/shm, and the volumes that the box's image declares.

The engine refuses to remove an image while a box or a further image is made of it. So unused images
are found by their labels and removed whenever a snapshot is dropped or a box of one ends. That includes an image whose
commit was cancelled or timed out here, which the engine finishes all the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import DockerImage, calling
from penstock.sandbox.docker.orphans import MAKER, SNAPSHOT, remove_images, snapshot_images
from penstock.sandbox.protocol import NoSnapshots, SandboxError

if TYPE_CHECKING:
    from aiodocker import Docker


logger = logging.getLogger(__name__)
REPOSITORY = "penstock-snapshot"
"""A name keeps an image from being pruned as one that has none."""


class SnapshotImages:
    """The snapshot images of one maker of boxes, by name."""

    def __init__(self, connected: Callable[[], Docker]) -> None:
        self._connected = connected
        self._maker = secrets.token_hex(8)
        self._kept_snapshots: set[str] = set()
        self._commits: set[asyncio.Task[str]] = set()
        self._sweeping = asyncio.Lock()
        self._any = False

    async def commit(self, container: Container, image: DockerImage, written_bytes: int) -> DockerImage:
        """Return an image of what `container`, of `image`, has written so far (`written_bytes`). It is paused
        meanwhile.

        Raises `SandboxError`, `NoSnapshots` among them.
        """
        snapshot_id = secrets.token_hex(12)
        self._any = True
        self._kept_snapshots.add(snapshot_id)
        commit = asyncio.create_task(self._commit(container, snapshot_id), name=f"commit of {container.name}")
        self._commits.add(commit)
        commit.add_done_callback(self._commits.discard)
        try:
            image_id = await asyncio.shield(commit)
        except BaseException:
            commit.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the caller has gone
            self._kept_snapshots.discard(snapshot_id)
            raise
        written_bytes += image.written_bytes
        return replace(image, name=_name(snapshot_id), image_id=image_id, written_bytes=written_bytes)

    async def _commit(self, container: Container, snapshot_id: str) -> str:
        """The image's id. In a separate task: the engine finishes what it was asked for, cancelled or not."""
        labels = [f"LABEL {SNAPSHOT}={snapshot_id}", f"LABEL {MAKER}={self._maker}"]
        try:
            # The engine copies and compares what the box wrote, which is gigabytes at most.
            async with calling(f"copying box {container.name} into an image", 120.0):
                source = self._connected().containers.container(container.name)
                image = await source.commit(repository=REPOSITORY, tag=snapshot_id, changes=labels)
        except SandboxError as error:
            if "max depth exceeded" in str(error):
                raise NoSnapshots(f"a copy of a copy, too many times over, cannot be copied again: {error}") from error
            raise
        return str(image["Id"])

    def is_wanted(self, name: str) -> bool:
        return name.partition(":")[2] in self._kept_snapshots

    def drop(self, name: str) -> None:
        """Marks the image as unused; `sweep` removes it."""
        self._kept_snapshots.discard(name.partition(":")[2])

    async def sweep(self, in_use: Collection[str]) -> None:
        """Removes the images that were dropped, but for `in_use`, the images of living sessions.

        Logged if it fails: the next sweep, or the next start of this owner, tries again.
        """
        if not self._any:
            return
        try:
            async with self._sweeping:
                entries = await snapshot_images(self._connected(), f"{MAKER}={self._maker}")
                names = {listed["Id"]: _name(listed["Labels"][SNAPSHOT]) for listed in entries}
                unwanted = [it for it, name in names.items() if name not in in_use and not self.is_wanted(name)]
                await remove_images(self._connected(), entries, unwanted)
        except SandboxError as error:
            logger.warning("sandbox: images of snapshots are removed later: %s", error)

    async def close(self) -> None:
        """After the last box has ended: nothing is left, but where the engine does not answer."""
        self._kept_snapshots.clear()
        if self._commits:
            await asyncio.wait(self._commits)
        await self.sweep(())


def is_snapshot(name: str) -> bool:
    return name.startswith(REPOSITORY + ":")


def _name(snapshot_id: str) -> str:
    return f"{REPOSITORY}:{snapshot_id}"
