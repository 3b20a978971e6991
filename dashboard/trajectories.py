"""Recorded trajectories: an SQLite index to list and search them, and one trajectory as the page draws it.

The index covers the recorder's ``trajectories/step_*.jsonl``, and lists 10,000 of them at once.

    step files ──refresh, newest first, within a time budget──► episodes(columns, file, offset, bytes) · texts
    list: Query ──► ids in order, remembered ──► one page          show: offset, bytes ──► one line of one file

The index is a cache next to the files: a file that changed (a resumed run trains its steps again) is read again, an
index of another shape or one that a crash damaged is made anew. Where the folder takes no files it is kept in memory.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.dashboard.jsonable import plain
from penstock.tools.parsers import ToolCallParser, get_parser
from penstock.transfer_queue import REWARD_TOLERANCE

COLUMNS = {
    "step": "INTEGER",
    "episode": "TEXT",
    "task": "TEXT",
    "reward": "REAL",
    "advantage": "REAL",
    "outcome": "TEXT",
    "reason": "TEXT",
    "turns": "INTEGER",
    "tokens": "INTEGER",
    "sampled": "INTEGER",
    "oldest": "INTEGER",
    "newest": "INTEGER",
    "tool_calls": "INTEGER",
    "source": "TEXT",
    "agent": "TEXT",
    "latency_s": "REAL",
    "snippet": "TEXT",
}


def columns_of(record: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Values by the names of `COLUMNS`. Raises `KeyError` for a line that is not a trajectory."""
    episode = str(record["episode_id"])
    runs = [run for segment in record["segments"] for run in segment["runs"]]
    versions = [version for run in runs for version, _ in run.get("versions", ())]
    sampled = [as_text(run["text"]) for run in runs if run["mask"]]
    outcome, extra, metrics = record.get("outcome", {}), record.get("extra", {}), record.get("metrics", {})
    return {
        "step": step,
        "episode": episode,
        "task": episode.rpartition("#")[0],
        "reward": record.get("reward"),
        "advantage": record.get("advantage"),
        "outcome": outcome.get("kind", ""),
        "reason": " ".join(filter(None, (outcome.get("component"), outcome.get("reason")))),
        "turns": record.get("num_turns", 0),
        "tokens": sum(run["tokens"] for run in runs),
        "sampled": sum(run["tokens"] for run in runs if run["mask"]),
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "tool_calls": int(metrics.get("tool_calls", 0)),
        "source": record.get("data_source", ""),
        "agent": str(extra.get("agent", "")),
        "latency_s": metrics.get("latency_s"),
        "snippet": " ".join(sampled[-1].split())[:160] if sampled else "",
    }


def searched_text(record: Mapping[str, Any]) -> str:
    """Prompts, the model's words and the answers of tools."""
    segments = ([segment["prompt"], *(run["text"] for run in segment["runs"])] for segment in record["segments"])
    return "\n".join(as_text(text) for texts in segments for text in texts)


def as_text(text: Any) -> str:
    """Return a recorded text. Joins a list of ids, which a recorder without a tokenizer writes."""
    return text if isinstance(text, str) else " ".join(str(piece) for piece in text)


Order = Literal["step", "reward", "advantage", "tokens", "turns", "latency_s"]


class Query(BaseModel):
    """Every condition must hold; those not given hold for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field("", max_length=500)
    """Text to find in messages and answers, or in the episode's name; letters of ASCII match in either case."""
    outcome: str = Field("", max_length=40)
    task: str = Field("", max_length=500)
    source: str = Field("", max_length=200)
    step: int | None = Field(None, ge=0)
    reward_min: float | None = None
    reward_max: float | None = None
    order: Order = "step"
    descending: bool = True

    def sql(self) -> tuple[str, str, list[object]]:
        """Returns the WHERE condition, the ORDER BY expression, and the values of the condition."""
        exact = [(f"{column} = ?", getattr(self, column)) for column in ("outcome", "task", "source", "step")]
        rounding = f"{REWARD_TOLERANCE} * max(1, abs(reward))"
        bounds = [(f"reward + {rounding} >= ?", self.reward_min), (f"reward - {rounding} <= ?", self.reward_max)]
        conditions = [(condition, value) for condition, value in exact + bounds if value not in ("", None)]
        texts, values = ["TRUE", *(condition for condition, _ in conditions)], [value for _, value in conditions]
        if self.text:
            texts.append(r"(episode LIKE ? ESCAPE '\' OR id IN (SELECT id FROM texts WHERE text LIKE ? ESCAPE '\'))")
            escaped = self.text.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")
            values += [f"%{escaped}%"] * 2
        direction = "DESC" if self.descending else "ASC"
        return " AND ".join(texts), f"{self.order} {direction} NULLS LAST, step DESC, offset", values


ABSENT: Mapping[str, Any] = {
    "outcome": {"kind": "", "reason": "", "component": ""},
    "extra": {},
    "metrics": {},
    "num_turns": 0,
}
"""Defaults for files of an older recorder."""


def page_record(record: Mapping[str, Any], parser_name: str) -> dict[str, Any]:
    """The record with ``pieces`` (the text of each token, if it was recorded) and ``calls`` in each run.

    `parser_name`: of the run; the record's own goes before it.
    """
    parser = _parser(str(record.get("extra", {}).get("parser", parser_name)))
    segments = [
        {**segment, "prompt": as_text(segment["prompt"]), "runs": [_run(run, parser) for run in segment["runs"]]}
        for segment in record["segments"]
    ]
    prepared: dict[str, Any] = plain({**ABSENT, **record, "segments": segments})
    return prepared


def _run(run: Mapping[str, Any], parser: ToolCallParser | None) -> dict[str, Any]:
    text = as_text(run["text"])
    calls = parser.parse(text).calls if parser is not None and run["mask"] else ()
    return {**run, "text": text, "pieces": _pieces(run, text), "calls": list(calls)}


def _pieces(run: Mapping[str, Any], text: str) -> Sequence[str]:
    """Empty if it is not known which token made which characters."""
    if not isinstance(run["text"], str):
        return [f"{number} " for number in run["text"]]
    ends = run.get("ends", ())
    return [text[start:end] for start, end in pairwise([0, *ends])]


def _parser(name: str) -> ToolCallParser | None:
    try:
        return get_parser(name)
    except ValueError:
        return None


logger = logging.getLogger(__name__)
SHAPE = 1
"""Version of the tables; another number makes the index anew."""
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
    """Index of one run's folder of trajectories. Safe to ask from several threads; `close` it."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._database = open_database(file)
        self._matches = functools.lru_cache(maxsize=16)(self._find)
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
        """Return the number of matches, and the rows of one page."""
        with self._lock:
            # Another page may write the same index: its rows have other numbers then.
            version = self._database.execute("PRAGMA data_version").fetchone()[0]
            ids = self._matches(query, self.generation, version)
            page_ids = ids[offset : offset + limit]
            sql = f"SELECT id, {NAMES} FROM episodes WHERE id IN ({', '.join('?' * len(page_ids))})"  # noqa: S608 - all ours
            rows = {
                number: dict(zip(COLUMNS, row, strict=True)) for number, *row in self._database.execute(sql, page_ids)
            }
        return len(ids), [rows[number] for number in page_ids if number in rows]

    def _find(self, query: Query, _generation: int, _version: int) -> Sequence[int]:
        """Ids in order. A search reads the text of every episode, half a second for 20,000 of them."""
        where, order, values = query.sql()
        sql = f"SELECT id FROM episodes WHERE {where} ORDER BY {order}"  # noqa: S608 - all ours
        return [row["id"] for row in self._database.execute(sql, values)]

    def record(self, episode: str, step: int) -> dict[str, Any] | None:
        """The recorded line; None if there is none (any more)."""
        sql = "SELECT file, offset, bytes FROM episodes WHERE episode = ? AND step = ?"
        with self._lock:
            row = self._database.execute(sql, (episode, step)).fetchone()
        line = _line(self._folder / row["file"], row["offset"], row["bytes"]) if row else None
        return line if line and line.get("episode_id") == episode else None

    def _forget(self, name: str) -> None:
        self._database.execute("DELETE FROM texts WHERE id IN (SELECT id FROM episodes WHERE file = ?)", (name,))
        self._database.execute("DELETE FROM episodes WHERE file = ?", (name,))
        self._database.execute("DELETE FROM files WHERE name = ?", (name,))

    def _read_file(self, name: str, mark: str) -> None:
        step = int(name[len("step_") : -len(".jsonl")])
        marks = ", ".join("?" * (len(COLUMNS) + 3))
        into = f"INSERT INTO episodes(file, offset, bytes, {NAMES}) VALUES ({marks})"  # noqa: S608
        end = 0
        with (self._folder / name).open("rb") as file:
            for line in file:
                offset, end = end, end + len(line)
                try:
                    record = json.loads(line)
                    values = columns_of(record, step)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    logger.warning("%s at byte %d is not a trajectory and is left out: %r", name, offset, error)
                    continue
                number = self._database.execute(into, (name, offset, len(line), *values.values())).lastrowid
                self._database.execute("INSERT INTO texts(id, text) VALUES (?, ?)", (number, searched_text(record)))
        self._database.execute("INSERT INTO files(name, mark) VALUES (?, ?)", (name, mark))


def open_database(file: Path) -> sqlite3.Connection:
    """The index in `file`, empty if there was none of this shape; in memory where no file can be kept."""
    try:
        return _open(str(file))
    except sqlite3.OperationalError as error:
        logger.warning("%s: %s; the index is kept in memory", file, error)
        return _open(":memory:")
    except sqlite3.DatabaseError as error:
        logger.warning("%s is damaged (%s) and made anew", file, error)
        file.unlink(missing_ok=True)
        return _open(str(file))


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
    marks = {}
    for path in folder.glob("step_*.jsonl"):
        if re.fullmatch(r"step_\d+\.jsonl", path.name):
            state = path.stat()
            marks[path.name] = f"{state.st_ino} {state.st_size} {state.st_mtime_ns}"
    return marks


def _line(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record: dict[str, Any] = json.loads(file.read(length))
    except (FileNotFoundError, ValueError):  # written again since it was indexed
        return None
    return record
