"""Limits shared by local backends: slots, concurrent starts, session ids, closing."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock.sandbox.box import Box
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import (
    BoxNeeds,
    ExceededSetting,
    NoSnapshots,
    NoSuchImage,
    SandboxBusy,
    SandboxError,
    SandboxLost,
    Session,
    Snapshot,
    UnmetNeeds,
)
from penstock.sandbox.session import DriverSession
from penstock.sandbox.snapshots import TMP, BoxCopy, SnapshotStore, copy_folders, fork_from

logger = logging.getLogger(__name__)

STARTS_AT_ONCE = max(2, os.cpu_count() or 1)
"""A start is mostly CPU time: a whole batch of episodes that ask together would share it out until all are too late."""
T = TypeVar("T")
HOST = "host"
"""The one image of boxes that show this machine's /usr."""


@dataclass(frozen=True, slots=True)
class SessionSlot:
    """The properties that all boxes of one session share."""

    session_id: str
    label: str
    image: str | None
    slot: int
    """No box of another living session of this maker has it."""
    needs: BoxNeeds = field(default_factory=BoxNeeds)


def shared_folders(config: SandboxConfig) -> dict[str, str]:
    """Path in a box → absolute path here, of `config.folders`. Raises `SandboxError` if one is not a folder."""
    folders = {inside: Path(here).expanduser().resolve() for inside, here in config.folders.items()}
    for inside, here in folders.items():
        if not here.is_dir():
            raise SandboxError(
                f"sandbox.folders.{inside}: {here} is not a folder of this machine: install there what boxes shall have"
            )
    return {inside: str(here) for inside, here in folders.items()}


def check_folders(config: SandboxConfig) -> None:
    """Raises `SandboxError` where one of `config.folders` holds anything but files, folders and links.

    A read-only mount keeps no box from connecting to a socket in it, or from writing into a pipe or a device.
    """
    for inside, here in shared_folders(config).items():
        for entry in _entries(inside, here):
            mode = entry.stat(follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise SandboxError(
                    f"sandbox.folders.{inside}: {entry.path} is not a file, folder or link: boxes could reach what is"
                    " behind it; take it away, or name another folder"
                )


def _entries(inside: str, folder: str) -> Iterator[os.DirEntry[str]]:
    """Everything below `folder`. Raises `SandboxError` if it cannot be listed."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:
            raise SandboxError(f"sandbox.folders.{inside}: {error.filename} cannot be looked at: {error}") from error


class LimitedSandbox(ABC):
    """At most `config.max_boxes` sessions at once; further ones wait up to `queue_timeout_s`."""

    containment: str
    """Which walls stand, in words."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises `SandboxError` where a folder that boxes would see cannot be shown to them."""
        check_folders(config)
        self.config = config
        self.queue_timeout_s = 120.0
        self._sessions: dict[str, Session] = {}
        self._requested_slots: dict[str, SessionSlot] = {}
        self._snapshots = SnapshotStore(config.snapshot_mb)
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        # the last one first: by its uid a box would tell its place in a row of them
        self._slots: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for slot in reversed(range(config.max_boxes)):
            self._slots.put_nowait(slot)

    @abstractmethod
    async def _open(self, slot: SessionSlot, release: Callable[[], None]) -> Session:
        """A session with its first box started; it calls `release` once, when it is closed.

        Raises `SandboxError`, and has not called `release` then.
        """

    def check_image(self, image: str | None) -> None:
        """Raises `NoSuchImage` where boxes of `image` cannot be made."""
        if image not in (None, HOST):
            raise NoSuchImage(
                f"image {image!r}: a {self.config.backend} box shows this machine's own system ({HOST!r}); boxes of"
                " images need sandbox.backend: docker"
            )

    def check_needs(self, needs: BoxNeeds) -> None:
        if needs.own_root and not self.config.own_root:
            raise UnmetNeeds("a session asks for its own root: allow that with sandbox.own_root: true")
        exceeded = [
            ExceededSetting(setting, limit, name, amount)
            for name, setting, limit in self._limits_of_needs()
            if (amount := getattr(needs, name)) is not None and amount > limit
        ]
        if exceeded:
            amounts = " and ".join(dict.fromkeys(f"{one.need} {one.amount:g}" for one in exceeded))
            limits = " and ".join(f"{one.setting} is {one.limit:g}" for one in exceeded)
            fixes = " and ".join(f"{one.setting}={one.amount:g}" for one in exceeded)
            raise UnmetNeeds(
                f"a session asks for {amounts}, and {limits}: set {fixes}, or leave its task out", exceeded
            )

    def _limits_of_needs(self) -> Iterator[tuple[str, str, float]]:
        """(a field of `BoxNeeds`, a setting that bounds it, its value)"""
        for name, most in self.config.own_limits.model_dump().items():
            yield name, f"sandbox.own_limits.{name}", most

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> Session:
        needs = needs or BoxNeeds()
        self.check_image(image)
        self.check_needs(needs)
        slot = SessionSlot(secrets.token_hex(12), label, image, await self._free_slot(), needs)

        def release() -> None:
            self._sessions.pop(slot.session_id, None)
            self._requested_slots.pop(slot.session_id, None)
            self._slots.put_nowait(slot.slot)

        self._requested_slots[slot.session_id] = slot  # from here on, so that the image it starts from stays
        try:
            session = await self._open(slot, release)
        except BaseException:
            release()
            raise
        self._sessions[slot.session_id] = session
        logger.debug("box %s in slot %d for %s", slot.session_id, slot.slot, label)
        return session

    async def _free_slot(self) -> int:
        try:
            async with asyncio.timeout(self.queue_timeout_s):
                return await self._slots.get()
        except TimeoutError as error:
            waited = f"all {self.config.max_boxes} boxes were in use for {self.queue_timeout_s:g} s"
            raise SandboxBusy(f"{waited}: raise sandbox.max_boxes or lower agent.concurrency") from error

    async def in_turn(self, launch: Callable[[], Awaitable[T]]) -> T:
        """Starts one box; its own deadline begins when its turn has come."""
        async with self._starts:
            return await launch()

    async def attach(self, session_id: str) -> Session:
        """Only this process's own: a box ends with the process that opened it."""
        if session_id not in self._sessions:
            raise SandboxLost(f"no session {session_id} here: a box ends with the process that opened it")
        return self._sessions[session_id]

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        for snapshot in self._snapshots.all():
            await self.forget(snapshot)

    async def snapshot(self, session: Session) -> Snapshot:
        slot, own = self._requested_slots.get(session.session_id), self._sessions.get(session.session_id)
        if slot is None or own is None:
            raise SandboxLost(f"session {session.session_id} is closed")
        copy = await self._copy(own, slot)
        try:
            return self._snapshots.keep(copy)
        except SandboxBusy:
            await self._drop(copy)
            raise

    async def fork(self, snapshot: Snapshot, label: str) -> Session:
        copy = self._snapshots.get(snapshot)
        try:
            return await fork_from(self, copy, label)
        except NoSuchImage as error:
            raise SandboxLost(f"the image of snapshot {snapshot.snapshot_id} is gone: {error}") from error

    async def forget(self, snapshot: Snapshot) -> None:
        copy = self._snapshots.forget(snapshot)
        if copy is not None:
            await self._drop(copy)

    async def _copy(self, session: Session, slot: SessionSlot) -> BoxCopy:
        """Raises `SandboxError`, `NoSnapshots` where a box like this one cannot be copied."""
        if slot.needs.own_root:
            raise NoSnapshots(f"sandbox.backend {self.config.backend}: a box with its own root cannot be copied")
        return BoxCopy(await copy_folders(session, [TMP]), slot.image, slot.needs)

    async def _drop(self, copy: BoxCopy) -> None:
        """Marks the snapshot as unused. Never raises: what cannot be removed now is removed later."""
        copy.close()


class DriverSandbox(LimitedSandbox):
    """Boxes of this machine's own system, with a driver in each."""

    @abstractmethod
    async def _launch(self, slot: SessionSlot) -> Box:
        """A fresh box. Raises `SandboxError`."""

    async def _open(self, slot: SessionSlot, release: Callable[[], None]) -> DriverSession:
        def launch() -> Awaitable[Box]:
            return self.in_turn(lambda: self._launch(slot))

        return DriverSession(slot.session_id, self.config, await launch(), launch, release)
