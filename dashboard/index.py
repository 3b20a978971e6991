"""An SQLite index over the recorder's ``trajectories/step_*.jsonl``, so that 10,000 of them are listed page by page.

    step files ──refresh, newest first, within a time budget──► episodes(columns, file, offset, bytes) · texts
    list: Query ──► ids in order, remembered ──► one page          show: offset, bytes ──► one line of one file

The index is a cache beside the files: a file that changed (a resumed run trains its steps again) is read again, an
index of another shape or one that a crash damaged is made anew. Where the folder takes no files it is kept in memory.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.dashboard.query import Query
from penstock.dashboard.rows import COLUMNS, columns_of, searched_text

logger = logging.getLogger(__name__)
SHAPE = 1
"""Of the tables; another number makes the index anew."""
REMEMBERED = 16
"""Answers to queries, as lists of ids."""
STEP_FILE = re.compile(r"step_\d+\.jsonl")
NAMES = ", ".join(COLUMNS)
TABLES = f"""
CREATE TABLE files(name TEXT PRIMARY KEY, mark TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes(id INTEGER PRIMARY KEY, file TEXT, offset INTEGER, bytes INTEGER,
    {", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())});
CREATE TABLE texts(id INTEGER PRIMARY KEY, text TEXT);
CREATE INDEX by_file ON episodes(file);
CREATE INDEX by_task ON episodes(task);
CREATE INDEX by_episode ON episodes(episode);
PRAGMA user_version = {SHAPE};
"""


class TrajectoryIndex:
    """Of one run's folder of trajectories. Safe to ask from several threads; `close` it."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._database = open_database(file)
        self._found: OrderedDict[tuple[Query, int, int], Sequence[int]] = OrderedDict()
        self.generation = 0
        """Grows when episodes came or went."""

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def refresh(self, budget_s: float) -> int:
        """Read what is new, newest steps first, for about so long; returns how many files are still to be read."""
        with self._lock:
            marks = _marks(self._folder)
            known = dict(self._database.execute("SELECT name, mark FROM files"))
            gone = [name for name in known if name not in marks]
            waiting = sorted((name for name in marks if known.get(name) != marks[name]), reverse=True)
            deadline, done = time.monotonic() + budget_s, 0
            if not gone and not waiting:
                return 0
            with self._database:
                for name in gone:
                    self._forget(name)
                for name in waiting:
                    self._forget(name)
                    self._read_file(name, marks[name])
                    done += 1
                    if time.monotonic() > deadline:
                        break
            self.generation += 1
            return len(waiting) - done

    def page(self, query: Query, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """How many match, and the rows of one page."""
        with self._lock:
            ids = self._matches(query)
            wanted = ids[offset : offset + limit]
            marks = ",".join("?" * len(wanted))
            sql = f"SELECT id, {NAMES} FROM episodes WHERE id IN ({marks})"  # noqa: S608 - names and marks are ours
            rows = {row["id"]: dict(row) for row in self._database.execute(sql, wanted)}
        return len(ids), [rows[number] for number in wanted if number in rows]

    def record(self, episode: str, step: int) -> dict[str, Any] | None:
        """The recorded line; None where there is none (any more)."""
        sql = "SELECT file, offset, bytes FROM episodes WHERE episode = ? AND step = ?"
        with self._lock:
            row = self._database.execute(sql, (episode, step)).fetchone()
        found = _line(self._folder / row["file"], row["offset"], row["bytes"]) if row else None
        return found if found and found.get("episode_id") == episode else None

    def _matches(self, query: Query) -> Sequence[int]:
        # Another page may write the same index: its rows have other numbers then.
        key = (query, self.generation, self._database.execute("PRAGMA data_version").fetchone()[0])
        if key not in self._found:
            sql, values = query.sql()
            self._found[key] = [row["id"] for row in self._database.execute(sql, values)]
            while len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return self._found[key]

    def _forget(self, name: str) -> None:
        self._database.execute("DELETE FROM texts WHERE id IN (SELECT id FROM episodes WHERE file = ?)", (name,))
        self._database.execute("DELETE FROM episodes WHERE file = ?", (name,))
        self._database.execute("DELETE FROM files WHERE name = ?", (name,))

    def _read_file(self, name: str, mark: str) -> None:
        step = int(name[len("step_") : -len(".jsonl")])
        marks = ", ".join("?" * (len(COLUMNS) + 3))
        into = f"INSERT INTO episodes(file, offset, bytes, {NAMES}) VALUES ({marks})"  # noqa: S608
        for offset, line in _lines(self._folder / name):
            try:
                record = json.loads(line)
                values = columns_of(record, step)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("%s at byte %d is no trajectory and left out: %r", name, offset, error)
                continue
            number = self._database.execute(into, (name, offset, len(line), *values.values())).lastrowid
            self._database.execute("INSERT INTO texts(id, text) VALUES (?, ?)", (number, searched_text(record)))
        self._database.execute("INSERT INTO files(name, mark) VALUES (?, ?)", (name, mark))


def open_database(file: Path) -> sqlite3.Connection:
    """The index in `file`, empty where there was none of this shape; in memory where no file can be kept."""
    for attempt in range(2):
        try:
            return _open(str(file))
        except sqlite3.OperationalError as error:
            logger.warning("%s: %s; the index is kept in memory", file, error)
            return _open(":memory:")
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s) and made anew", file, error)
            file.unlink(missing_ok=True)
            if attempt:
                raise
    raise AssertionError("unreachable")


def _open(file: str) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=10.0, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA synchronous = OFF")  # a cache: after a power cut it is made anew
    if database.execute("PRAGMA user_version").fetchone()[0] != SHAPE:
        tables = [row["name"] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        drop = "".join(f"DROP TABLE {name};" for name in tables)
        database.executescript(f"BEGIN IMMEDIATE;{drop}{TABLES}COMMIT;")
    return database


def _marks(folder: Path) -> dict[str, str]:
    """Step files by name, each with what changes when it is written again."""
    found = {}
    for path in folder.glob("step_*.jsonl"):
        if STEP_FILE.fullmatch(path.name):
            state = path.stat()
            found[path.name] = f"{state.st_ino} {state.st_size} {state.st_mtime_ns}"
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)


def _line(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record: dict[str, Any] = json.loads(file.read(length))
    except (FileNotFoundError, ValueError):  # written again since it was indexed
        return None
    return record
