"""The folder of an index: built next to its place, moved there when it is whole, kept until its corpus changes.

INDEX.building/  ──write, manifest, rename──►  INDEX/      a killed build leaves no INDEX, the next one starts over
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.common import FileLock
from penstock.tools.retrieval.corpus import BadCorpus

MANIFEST = "penstock.json"


class IndexFailed(RuntimeError):
    """The index cannot be built or opened; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sources of an index, which is reused while they are unchanged."""

    kind: str
    """Kind of the index, with the number of its format."""
    corpus_bytes: int
    corpus_mtime_ns: int


def ensure_built(corpus: Path, folder: Path, kind: str, write: Callable[[Path], int]) -> None:
    """`folder` holds the index of `corpus`; built if it is missing or outdated.

    Args:
        write: fills an empty folder and returns the number of passages.

    Raises:
        BadCorpus: the file is missing or holds no passage.
        IndexFailed: no disk space, no right to write, or the folder holds something else.
    """
    if not corpus.is_file():
        raise BadCorpus(f"{corpus}: no such file")
    stat = corpus.stat()
    manifest = Manifest(kind, stat.st_size, stat.st_mtime_ns)
    if _manifest_in(folder) == manifest:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # One process at a time: two that share a half-written folder would publish it. Waits for another's whole build.
        # The kernel's lock goes with its holder, however that ends; the empty file stays.
        lock = FileLock(folder.with_name(f"{folder.name}.lock"), "another process builds this index")
        lock.wait()
        try:
            if _manifest_in(folder) != manifest:  # another process may have built it meanwhile
                _build(corpus, folder, manifest, write)
        finally:
            lock.release()
    except OSError as error:
        raise IndexFailed(f"{folder}: the index cannot be written: {error}") from error


def _manifest_in(folder: Path) -> Manifest | None:
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _build(corpus: Path, folder: Path, manifest: Manifest, write: Callable[[Path], int]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    if write(building) == 0:
        shutil.rmtree(building)
        raise BadCorpus(f"{corpus}: holds no passage")
    (building / MANIFEST).write_text(json.dumps(asdict(manifest)))
    if folder.exists():  # only what an earlier build made is removed, never a folder that holds something else
        if not (folder / MANIFEST).is_file() and any(folder.iterdir()):
            raise IndexFailed(f"{folder} exists and is not an index of ours; choose another folder")
        shutil.rmtree(folder)
    building.rename(folder)
