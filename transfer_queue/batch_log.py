"""The batch log: payloads of trained, uncommitted steps wait here for their commit, not in the store's memory.

    append(step, blobs) ──► STEP-NUMBER-WRITER.batch.tmp ─► fsync ─► rename ─► fsync of the folder ─► durable
    read(step, ids)     ──► tables of contents, each read once ─► one seek per payload, checked
    drop_below(step)    ──► files of committed steps go

A file is written once and never changed; half a file never has a name that is read. NUMBER is above that of every file
that was there: an episode that was appended again counts as in the file with the highest. Several processes may share a
folder, each with writers of its own.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.transfer_queue.batch_file import Place, pack_head, read_payload, read_table, write_file
from penstock.transfer_queue.queue import BadPayload

_NAME = re.compile(r"(\d{8,})-(\d{8,})-[\w.-]+\.batch(\.tmp)?", re.ASCII)
_WRITER = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    step: int
    number: int
    whole: bool


class BatchLog:
    """Blocking; safe for several threads. `folder` is made, readable by its owner only, when something is appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables: dict[Path, dict[str, Place]] = {}
        """Tables of contents that were read."""
        self._appending = threading.Lock()
        self._reading = threading.Lock()

    def append(self, step: int, blobs: Mapping[str, bytes], writer: str) -> None:
        """Keep packed payloads of `step`, by episode id. When this returns they survive a power cut.

        A call that failed or died may be repeated. Raises `OSError` where the disk is full or away, `ValueError` for a
        `writer` that cannot be part of a file's name.
        """
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"writer is {writer!r}; letters, digits, '_', '.' and '-' only, at most 64")
        if not blobs:
            return
        self._make_folder()
        with self._appending:
            number = 1 + max((file.number for file in self._files()), default=0)
            final = self.folder / f"{step:08d}-{number:08d}-{writer}.batch"
            temporary = final.with_name(f"{final.name}.tmp")
            try:
                write_file(temporary, (pack_head(step, blobs), *blobs.values()))
                temporary.rename(final)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _fsync_folder(self.folder)

    def read(self, step: int | None, episode_ids: Iterable[str]) -> dict[str, bytes]:
        """Packed payloads of `step`, or of whatever step where it is None, by episode id in the order asked.

        Raises `BadPayload` naming file, episode and what is damaged or missing.
        """
        wanted = list(dict.fromkeys(episode_ids))
        places = self._find(step, wanted)
        try:
            return {name: read_payload(name, places[name]) for name in wanted}
        except FileNotFoundError as error:
            raise BadPayload(f"{error.filename} went while it was read: its step is committed") from error

    def drop_below(self, step: int) -> int:
        """Remove what is of steps below `step`, left-overs of killed writers too; returns the number of files."""
        gone = [file.path for file in self._files() if file.step < step]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def steps(self) -> list[int]:
        """Steps of which something is here, in order."""
        return sorted({file.step for file in self._files() if file.whole})

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _fsync_folder(self.folder.parent)

    def _files(self) -> Iterator[_File]:
        """Every file of ours; none where the folder is not there yet."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                step, number, unfinished = match.groups()
                yield _File(path, int(step), int(number), unfinished is None)

    def _find(self, step: int | None, wanted: Sequence[str]) -> dict[str, Place]:
        """Where each episode was appended last. Tables are read newest first, and only until all are found."""
        missing, found, damaged = set(wanted), dict[str, Place](), list[str]()
        for file in self._newest_first(step):
            if not missing:
                break
            try:
                table = self._table(file)
            except BadPayload as error:
                damaged.append(str(error))
                continue
            found |= {name: table[name] for name in missing & table.keys()}
            missing -= table.keys()
        if missing:
            raise BadPayload(self._what_is_missing(step, min(missing), damaged))
        return found

    def _newest_first(self, step: int | None) -> list[_File]:
        files = [file for file in self._files() if file.whole]
        here = {file.path for file in files}
        with self._reading:
            # Only one process drops files; the tables of the others would grow for ever.
            self._tables = {path: table for path, table in self._tables.items() if path in here}
        chosen = [file for file in files if step in (None, file.step)]
        return sorted(chosen, key=lambda file: file.number, reverse=True)

    def _table(self, file: _File) -> dict[str, Place]:
        """Empty where another process dropped the file meanwhile."""
        with self._reading:
            if file.path not in self._tables:
                try:
                    self._tables[file.path] = read_table(file.path, file.step)
                except FileNotFoundError:
                    return {}
            return self._tables[file.path]

    def _what_is_missing(self, step: int | None, name: str, damaged: Sequence[str]) -> str:
        where = f"the batch log {self.folder}" + ("" if step is None else f", step {step}")
        also = f"; files that cannot be read: {', '.join(damaged)}" if damaged else ""
        return f"{name}: not in {where}{also}"


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
