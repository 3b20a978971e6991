"""The archive of a run: batches of trained steps on disk, for a resume before their commit and for people after it.

    append(step, trajectories) ──► batches/STEP-NUMBER-DIGEST.parquet.tmp ─► fsync ─► rename ─► fsync of the folder
    read(step, ids)            ──► the newest file with each, its bytes compared with DIGEST
    commit(step, batches)      ──► index/FIRST.parquet: a row per episode of the steps that the weights saw ─► prune
    committed(first, last)     ──► the groups of those steps, for a resume whose checkpoint lacks their updates
    rewind(step)               ──► the index forgets `step` and later: they are trained again

A file of batches is written once and never changed; DIGEST is the SHA-256 of its bytes, so a torn or changed file is no
file of the archive, and a share that is appended again is there already. NUMBER is greater than that of every existing
file: of an episode that was appended twice, the copy in the file with the highest number counts. Several processes may
append; one commits. The index is the only place that says which batches count.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.common import fsync_path, write_atomically
from penstock.common.files import write_synced
from penstock.transfer_queue.archive.columns import VALUES, table_of, trajectories_of
from penstock.transfer_queue.errors import BadPayload
from penstock.transfer_queue.types import Trajectory

FORMAT = "1"
FORMAT_KEY = b"penstock.archive"
"""Key in the metadata of every file."""
INDEX = pa.schema(
    {
        "run": pa.string(),
        "step": pa.int64(),
        "group": pa.int32(),
        "member": pa.int32(),
        **{name: kind for name, kind in VALUES.items() if name != "step"},
        "file": pa.string(),
        "row": pa.int32(),
    }
)
"""`group` and `member`: place in the step's batch. `row` in `file` below batches/."""
SEGMENT_ROWS = 4096
"""A file of the index with fewer rows is written anew with those of the next commit."""
_NAME = re.compile(r"(\d{8,})-(\d{8,})-([0-9a-f]{32})\.parquet(\.tmp)?", re.ASCII)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchFile:
    path: Path
    step: int
    number: int
    digest: str
    whole: bool


class Archive:
    """Blocking; safe for several threads. `folder` is created by the first append, readable by its owner only."""

    def __init__(self, folder: Path, run: str = "", max_bytes: int = 0) -> None:
        """`max_bytes`: of the committed batches that are kept; the oldest go first."""
        self.folder = folder
        self._batches, self._index = folder / "batches", folder / "index"
        self._run, self._max_bytes = run, max_bytes
        self._contents: dict[Path, pa.Table] = {}
        """Columns `VALUES` of files that were opened and are not committed."""
        self._committed = 0
        """Steps below are in the index, or are not to be."""
        self._appending = threading.Lock()
        self._reading = threading.Lock()

    def append(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Store trajectories of `step`. They are durable when this returns; a repeat is harmless.

        Raises `OSError` if the disk is full or missing.
        """
        if not trajectories:
            return
        data = _packed(table_of(step, trajectories))
        digest = sha256(data).hexdigest()[:32]
        with self._appending:
            self._make_folders()
            files = list(self.files())
            same = [file for file in files if (file.step, file.digest, file.whole) == (step, digest, True)]
            if not any(map(_is_sound, same)):
                number = 1 + max((file.number for file in files), default=0)
                final = self._batches / f"{step:08d}-{number:08d}-{digest}.parquet"
                temporary = final.with_name(f"{final.name}.tmp")
                try:
                    write_synced(temporary, (data,))
                    temporary.rename(final)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
            fsync_path(self._batches)  # also of a file that a killed life had renamed

    def read(self, step: int, episode_ids: Iterable[str]) -> dict[str, Trajectory]:
        """Trajectories of `step` by episode id, in the order given.

        Raises `BadPayload` naming the file or the episode and the damaged or missing part.
        """
        names = list(dict.fromkeys(episode_ids))
        places = self._find(step, names)
        trajectories: dict[str, Trajectory] = {}
        for path in {path: None for path, _ in places.values()}:
            here = {name: row for name, (file, row) in places.items() if file == path}
            trajectories |= zip(here, trajectories_of(read_batches(path), here.values()), strict=True)
        return {name: trajectories[name] for name in names}

    def commit(self, step: int, batches: Mapping[int, Sequence[Sequence[str]]], oldest: int | None = None) -> None:
        """Steps below `step` are in a durable checkpoint, trained on these groups by step: the index has them from now
        on, and the oldest steps go while there are more than `max_bytes`. Twice is a no-op.

        `oldest`: the step of the oldest checkpoint, None: `step`. Steps from there on stay, so that a resume from it
        loses no update. A step of which an episode is missing is not in the index, with a warning. Raises `OSError`.
        """
        path = max(self._segment_paths(), default=None)
        newest = INDEX.empty_table() if path is None else _parsed(path, path.read_bytes())
        indexed = max(self._committed - 1, *newest["step"].to_pylist()[-1:], -1)
        tables = []
        for number in sorted(batches):
            if indexed < number < step:
                try:
                    tables.append(self._rows_of(number, batches[number]))
                except BadPayload as error:
                    logger.warning("step %d is not in the archive: %s", number, error)
        rows = pa.concat_tables([INDEX.empty_table(), *tables])
        if len(rows) and (path is None or len(newest) >= SEGMENT_ROWS):
            path = self._index / f"{rows['step'][0].as_py():08d}.parquet"
            write_atomically(path, [_packed(rows)], mode=0o600, durable=True)
        elif len(rows) and path is not None:
            write_atomically(path, [_packed(pa.concat_tables([newest, rows]))], mode=0o600, durable=True)
        self._committed = max(self._committed, step)
        with self._reading:
            self._contents = {
                path: one for path, one in self._contents.items() if path.exists() and _step(path) >= step
            }
        self.prune(self._bound(), step if oldest is None else min(step, oldest))

    def rewind(self, step: int, lost: Collection[int] = ()) -> None:
        """Steps from `step` on are trained again, and the updates of the `lost` ones are not in the weights: the index
        has none of them any more."""
        self._keep_in_index(lambda number: number < step and number not in lost)
        self._committed = 0
        for file in self.files():
            if not file.whole:
                file.path.unlink(missing_ok=True)

    def prune(self, max_bytes: int, below: int | None = None) -> list[int]:
        """Delete the oldest steps until the archive has at most `max_bytes`; only steps below `below`, None: those in
        the index. Returns the steps."""
        sizes = self._sizes()
        last = self.index().column("step").to_pylist()[-1:] if below is None else [below - 1]
        left, gone = sum(sizes.values()), set[int]()
        for file in sorted(sizes, key=lambda file: file.step):
            if last and file.step <= last[0] and (file.step in gone or left > max_bytes):
                gone.add(file.step)
                left -= sizes[file]
        if gone:
            self._keep_in_index(lambda number: number not in gone)
        for file in sizes:
            if file.step in gone:
                file.path.unlink(missing_ok=True)
        return sorted(gone)

    def index(self) -> pa.Table:
        """Every episode of committed steps, in the order in which it was trained. Raises `BadPayload`."""
        return pa.concat_tables(
            [INDEX.empty_table(), *(_parsed(one, one.read_bytes()) for one in self._segment_paths())]
        )

    def pending(self) -> pa.Table:
        """Episodes of the steps after the index, as the index has them: in no checkpoint yet, or never learned because
        the run ended at their step. Raises `BadPayload`."""
        last = max(self.index()["step"].to_pylist(), default=-1)
        steps = [step for step in self.steps() if step > last]
        return pa.concat_tables([INDEX.empty_table(), *(self._rows_of(one, self._uncommitted(one)) for one in steps)])

    def batches(self, first: int, last: int) -> dict[int, list[list[str]]]:
        """Groups of each step from `first` to before `last`: of the index, or of the files where the step is in no
        checkpoint yet. Raises `BadPayload` naming a step that is not there."""
        batches = self._indexed(first, last)
        for step in range(first, last):
            if step not in batches:
                batches[step] = self._uncommitted(step)
        return batches

    def committed(self, first: int, last: int) -> dict[int, list[list[str]]]:
        """Groups of each whole step from `first` to before `last`, of the index alone: what the weights were trained
        on. A step that is not in the index, or of which the file of an episode is lost or damaged, is left out, the
        latter with a warning. Raises `BadPayload` if the index is damaged."""
        batches = self._indexed(first, last)
        for step in list(batches):
            try:
                self._find(step, [episode for group in batches[step] for episode in group])
            except BadPayload as error:
                logger.warning("step %d is not whole: %s", step, error)
                del batches[step]
        return batches

    def _indexed(self, first: int, last: int) -> dict[int, list[list[str]]]:
        batches: dict[int, list[list[str]]] = {}
        for row in self.index().select(["step", "group", "episode"]).to_pylist():
            if first <= row["step"] < last:
                groups = batches.setdefault(row["step"], [])
                groups += [[] for _ in range(row["group"] + 1 - len(groups))]
                groups[row["group"]].append(row["episode"])
        return batches

    def _uncommitted(self, step: int) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for file in sorted(self.files(), key=lambda file: file.number):
            if file.whole and file.step == step:
                for row in read_batches(file.path, ["task", "episode"]).to_pylist():
                    members = groups.setdefault(row["task"], [])
                    members += [] if row["episode"] in members else [row["episode"]]
        indexed = self.index()["step"].to_pylist()
        if not groups or step < max(indexed, default=-1):
            there = f"its index has steps {indexed[0]} to {indexed[-1]}" if indexed else "its index is empty"
            raise BadPayload(f"{self.folder}: step {step} is not in the archive; {there}")
        return list(groups.values())

    def steps(self) -> list[int]:
        """Steps with at least one file, in order, whether they are committed or not."""
        return sorted({file.step for file in self.files() if file.whole})

    def files(self) -> Iterator[BatchFile]:
        """Every file of batches; none if the folder does not exist yet."""
        if not self._batches.is_dir():
            return
        for path in self._batches.iterdir():
            if match := _NAME.fullmatch(path.name):
                step, number, digest, unfinished = match.groups()
                yield BatchFile(path, int(step), int(number), digest, unfinished is None)

    def verify(self) -> list[str]:
        """Return a sentence for each fault: torn and changed files, rows of the index whose batch is not there, and
        episodes that stand in it twice."""
        faults = [f"{file.path.name}: never finished; its writer died" for file in self.files() if not file.whole]
        tables: dict[str, pa.Table] = {}
        for file in sorted((one for one in self.files() if one.whole), key=lambda one: one.path):
            try:
                tables[file.path.name] = read_batches(file.path, ["step", "episode"])
            except BadPayload as error:
                faults.append(str(error))
        try:
            rows = self.index().select(["step", "episode", "file", "row"]).to_pylist()
        except BadPayload as error:
            return [*faults, str(error)]
        seen: set[str] = set()
        for row in rows:
            where = f"index: step {row['step']}, {row['episode']}"
            if row["episode"] in seen:
                faults.append(f"{where}: in the index twice")
            seen.add(row["episode"])
            table = tables.get(row["file"])
            if table is None or row["row"] >= len(table) or table["episode"][row["row"]].as_py() != row["episode"]:
                faults.append(f"{where}: not in {row['file']}")
        return faults

    def _bound(self) -> int:
        """`max_bytes`, or half of what the disk has for it if that is less: checkpoints need room too."""
        if not self._batches.is_dir():
            return self._max_bytes
        return min(self._max_bytes, (sum(self._sizes().values()) + shutil.disk_usage(self.folder).free) // 2)

    def _sizes(self) -> dict[BatchFile, int]:
        """Bytes of each file; another process may delete some meanwhile: `penstock archive prune`, or the next life of
        a trainer that a fence is about to stop."""
        sizes = dict[BatchFile, int]()
        for file in self.files():
            with suppress(FileNotFoundError):
                sizes[file] = file.path.stat().st_size
        return sizes

    def _make_folders(self) -> None:
        if self._batches.is_dir() and self._index.is_dir():
            return
        for folder in (self.folder, self._batches, self._index):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fsync_path(folder.parent)

    def _rows_of(self, step: int, groups: Sequence[Sequence[str]]) -> pa.Table:
        """Rows of the index for a step's batch. Raises `BadPayload`."""
        members = [(group, member, name) for group, names in enumerate(groups) for member, name in enumerate(names)]
        places = self._find(step, [name for _, _, name in members])
        files = {path: None for path, _ in places.values()}
        starts, tables = dict[Path, int](), list[pa.Table]()
        for path in files:
            starts[path] = sum(map(len, tables))
            tables.append(self._table_of_contents(path))
        if not tables:
            return INDEX.empty_table()
        rows = pa.concat_tables(tables).take([starts[places[name][0]] + places[name][1] for _, _, name in members])
        further = {
            "run": [self._run] * len(members),
            "group": [group for group, _, _ in members],
            "member": [member for _, member, _ in members],
            "file": [places[name][0].name for _, _, name in members],
            "row": [places[name][1] for _, _, name in members],
        }
        columns = [pa.array(further[f.name], f.type) if f.name in further else rows[f.name] for f in INDEX]
        return pa.table(columns, schema=INDEX)

    def _find(self, step: int, names: Sequence[str]) -> dict[str, tuple[Path, int]]:
        """The newest place of each episode: file and row. Raises `BadPayload`."""
        missing, places, damaged = set(names), dict[str, tuple[Path, int]](), list[str]()
        files = [file for file in self.files() if file.whole and file.step == step]
        for file in sorted(files, key=lambda file: file.number, reverse=True):
            if not missing:
                break
            try:
                episodes = self._table_of_contents(file.path)["episode"].to_pylist()
            except BadPayload as error:
                damaged.append(str(error))
                continue
            places |= {name: (file.path, row) for row, name in enumerate(episodes) if name in missing}
            missing -= set(episodes)
        if missing:
            also = f"; files that cannot be read: {', '.join(damaged)}" if damaged else ""
            raise BadPayload(f"{min(missing)}: not in the archive {self.folder}, step {step}{also}")
        return places

    def _table_of_contents(self, path: Path) -> pa.Table:
        with self._reading:
            if path not in self._contents:
                self._contents[path] = read_batches(path, list(VALUES)).replace_schema_metadata()
            return self._contents[path]

    def _segment_paths(self) -> list[Path]:
        """Files of the index, oldest first."""
        return sorted(self._index.glob("*.parquet")) if self._index.is_dir() else []

    def _keep_in_index(self, is_kept: Callable[[int], bool]) -> None:
        """Rewrite the files of the index that have steps which are not kept."""
        for path in self._segment_paths():
            table = _parsed(path, path.read_bytes())
            mask = pa.array([is_kept(number) for number in table["step"].to_pylist()], pa.bool_())
            kept = table.filter(mask)
            if not len(kept):
                path.unlink(missing_ok=True)
            elif len(kept) < len(table):
                write_atomically(path, [_packed(kept)], mode=0o600, durable=True)


def read_batches(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in a file of batches, whole or some columns of it. Raises `BadPayload` naming the file and what is
    wrong; also for one that another process has committed and pruned meanwhile."""
    try:
        match, data = _NAME.fullmatch(path.name), path.read_bytes()
    except FileNotFoundError as error:
        raise BadPayload(f"{path.name}: another process has deleted it") from error
    if match is None or sha256(data).hexdigest()[:32] != match[3]:
        raise BadPayload(f"{path.name}: its bytes are not those of its name; the file is torn or was changed")
    return _parsed(path, data, columns)


def _parsed(path: Path, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    try:
        # `read_table` starts a pool of threads, which may abort the process when its interpreter ends.
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False)
        table = file.read(columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise BadPayload(f"{path.name}: no whole Parquet file: {error}") from error
    version = (file.metadata.metadata or {}).get(FORMAT_KEY, b"none").decode()
    if version != FORMAT:
        raise BadPayload(f"{path.name}: archive format {version} is unknown; this build reads format {FORMAT}")
    return table


def _packed(table: pa.Table) -> bytes:
    """The bytes of a Parquet file."""
    sink, plain = pa.BufferOutputStream(), table.replace_schema_metadata()
    # In files of some kB, dictionaries, statistics and Arrow's own schema take more than they spare. Without that
    # schema a column has at most 2^31 values. Bytes of logprobs compress by their place in the number.
    small = {"use_dictionary": False, "write_statistics": False, "store_schema": plain.nbytes > 1 << 20}
    split = {"use_byte_stream_split": ["segments.list.element.response_logprobs.list.element"]}
    with pq.ParquetWriter(
        sink, plain.schema, compression="zstd", compression_level=3, write_page_checksum=True, **small, **split
    ) as writer:
        writer.write_table(plain)
        writer.add_key_value_metadata({FORMAT_KEY: FORMAT})
    return sink.getvalue().to_pybytes()


def _is_sound(file: BatchFile) -> bool:
    return sha256(file.path.read_bytes()).hexdigest()[:32] == file.digest


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])
