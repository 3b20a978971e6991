"""The archive: what was appended is read back to the bit, by any process, or the damage is named.

kill -9 in the middle of an append: what was said to be durable is there, and of the rest nothing or all.
"""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_samples import COMPLETED, images_of, same, segment, trajectories

from penstock.common import fsync_path
from penstock.transfer_queue import Archive, BadPayload, Trajectory, decode_trajectory, encode_trajectory
from penstock.transfer_queue.archive import archive as module

GROUPS = [["train/0#0", "train/0#1"], ["train/1#0"]]


def one(episode: str, step: int = 0, **changes: object) -> Trajectory:
    made = Trajectory(episode, episode.partition("#")[0], [segment([step, step])], 0.5, COMPLETED, num_turns=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def batch(step: int) -> list[Trajectory]:
    return [one(f"{step}/{name}", step) for group in GROUPS for name in group]


def groups_of(step: int) -> list[list[str]]:
    return [[f"{step}/{name}" for name in group] for group in GROUPS]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "run" / "archive", "mine", 1 << 30)


def filled(archive: Archive, steps: int, committed: int | None = None) -> Archive:
    for step in range(steps):
        archive.append(step, batch(step))
    archive.commit(steps if committed is None else committed, {step: groups_of(step) for step in range(steps)})
    return archive


def indexed(archive: Archive) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row in Archive(archive.folder).index().to_pylist():
        found.setdefault(row["step"], []).append(row["episode"])
    return found


def names(step: int) -> list[str]:
    return [name for group in groups_of(step) for name in group]


def path_of(archive: Archive, step: int) -> Path:
    (path,) = (archive.folder / "batches").glob(f"{step:08d}-*.parquet")
    return path


@settings(max_examples=25)
@given(st.lists(trajectories, min_size=1, max_size=3), st.lists(st.binary(min_size=1, max_size=50), max_size=2))
def test_any_trajectories_come_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Trajectory], images: list[bytes]
) -> None:
    """All are of one run, so routed experts have one type. An image of several trajectories is stored once."""
    kind = (
        np.uint16
        if any(s.routed_experts is not None and s.routed_experts.itemsize > 1 for t in drawn for s in t.segments)
        else np.uint8
    )
    sent = {}
    for number, made in enumerate(drawn):
        segments = [
            replace(one, routed_experts=None if one.routed_experts is None else one.routed_experts.astype(kind))
            for one in made.segments
        ]
        shown = images_of(*(images for _ in segments), elsewhere=b"x") if segments else None
        sent[f"e{number}"] = replace(made, episode_id=f"e{number}", segments=segments, images=shown)
    folder = tmp_path_factory.mktemp("archive")
    Archive(folder).append(3, list(sent.values()))
    found = Archive(folder).read(3, reversed(sent))
    assert list(found) == list(reversed(sent))
    assert all(same(found[name], made) for name, made in sent.items())
    assert not any(s.response_ids.flags.writeable for made in found.values() for s in made.segments)


def test_bytes_in_extra_and_images_of_a_group_survive(archive: Archive) -> None:
    shown = images_of([b"a" * 5_000, b"b"])
    sent = [one(f"e{n}", images=shown, extra={"said": b"\xff\0", "deep": [{"x": float("inf")}]}) for n in range(3)]
    archive.append(0, sent)
    assert [same(found, made) for found, made in zip(archive.read(0, ["e0", "e1", "e2"]).values(), sent, strict=True)]
    assert archive.read(0, ["e2"])["e2"].extra == sent[2].extra
    assert archive.read(0, ["e2"])["e2"].images == shown


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"metrics": {"at_ns": 2**60 + 1}}, {"metrics": {"at_ns": 2.0**60}}),
        ({"metrics": {"tokens": 2**63}}, {"metrics": {"tokens": 2.0**63}}),
        ({"metrics": {4: 0.5}}, {"metrics": {"4": 0.5}}),
        ({"reward": 2**60 + 1}, {"reward": 2.0**60}),
        (
            {"extra": {"header": [{b"age": 1, "of": {b"x": b"y"}}]}},
            {"extra": {"header": [{"age": 1, "of": {"x": b"y"}}]}},
        ),
    ],
)
def test_whatever_the_queue_takes_is_archived(archive: Archive, stored: dict[str, Any], read: dict[str, Any]) -> None:
    """A trainer that cannot archive a batch ends, and gets the same batch again."""
    taken = decode_trajectory(encode_trajectory(one("train/0#0", **stored)))
    archive.append(0, [taken])
    (name,) = read
    assert getattr(archive.read(0, ["train/0#0"])["train/0#0"], name) == read[name]


def test_the_index_has_each_committed_episode_once_in_the_order_of_its_batch(archive: Archive) -> None:
    filled(archive, 3, committed=2)
    assert indexed(archive) == {0: names(0), 1: names(1)}
    archive.commit(3, {step: groups_of(step) for step in range(3)})
    archive.commit(3, {2: groups_of(2)})
    assert indexed(archive) == {step: names(step) for step in range(3)}
    row = archive.index().to_pylist()[5]
    assert (row["run"], row["group"], row["member"], row["reward"], row["outcome"]) == ("mine", 1, 0, 0.5, "completed")
    assert (row["oldest_version"], row["newest_version"], row["tokens"], row["num_turns"]) == (1, 1, 2, 1)
    assert archive.verify() == []


def test_pyarrow_alone_reads_it(archive: Archive) -> None:
    filled(archive, 2)
    rows = pq.read_table(archive.folder / "index").to_pylist()
    table = pq.read_table(archive.folder / "batches" / rows[4]["file"])
    found = table.slice(rows[4]["row"], 1).to_pylist()[0]
    assert (found["episode"], found["segments"][0]["response_ids"]) == (rows[4]["episode"], [0, 1, 2])
    assert found["segments"][0]["version_spans"][0] == {"version": 1, "start": 0, "end": 1}


def test_a_step_of_short_episodes_takes_little_more_than_its_compressed_payloads(archive: Archive) -> None:
    """64 episodes of 12 sampled tokens, beside which the names and types of the columns must be few bytes."""
    chance = np.random.default_rng(0)
    metrics = [f"{kind}/{name}" for kind in ("calls", "tool", "mismatch") for name in ("count", "errors", "latency_s")]
    groups, sent = [[f"train/0000/0000000{group}#{member}" for member in range(8)] for group in range(8)], []
    for episode in (name for group in groups for name in group):
        short = replace(
            segment([0] * 12),
            response_ids=chance.integers(0, 500, 12, np.int32),
            response_logprobs=-chance.random(12, np.float32),
        )
        measured = {name: float(chance.integers(0, 3)) for name in metrics} | {"latency_s": chance.random()}
        sent.append(one(episode, segments=[short], metrics=measured, extra={"worker": "agent-1", "tool_results": []}))
    archive.append(0, sent)
    archive.commit(1, {0: groups})
    payload = len(pa.Codec("zstd").compress(b"".join(map(encode_trajectory, sent)), asbytes=True))
    stored = sum(path.stat().st_size for path in (archive.folder / "batches").iterdir())
    assert stored <= 1.2 * payload


def test_steps_that_are_trained_again_stand_in_the_index_as_the_weights_saw_them(archive: Archive) -> None:
    """A queue that lost its last second gave step 2 other episodes, and one of step 1's ran again otherwise."""
    filled(archive, 3)
    archive.rewind(1)
    assert indexed(archive) == {0: names(0)}
    again = [one("1/train/0#0", 1, reward=0.25), *batch(1)[1:]]
    archive.append(1, again)
    archive.append(2, [one("other#0", 2)])
    archive.commit(3, {1: groups_of(1), 2: [["other#0"]]})
    assert indexed(archive) == {0: names(0), 1: names(1), 2: ["other#0"]}
    assert archive.read(1, names(1))["1/train/0#0"].reward == 0.25
    assert archive.index()["reward"].to_pylist()[3] == 0.25
    assert archive.verify() == []


def test_lost_updates_are_not_in_the_index(archive: Archive) -> None:
    filled(archive, 4).rewind(4, lost=range(1, 3))
    assert sorted(indexed(archive)) == [0, 3]


def test_a_life_killed_between_its_commit_and_the_index_is_made_good(archive: Archive) -> None:
    filled(archive, 4, committed=2)
    later = Archive(archive.folder, "mine", 1 << 30)
    later.rewind(4)
    later.commit(4, {step: groups_of(step) for step in range(1, 4)})
    assert indexed(archive) == {step: names(step) for step in range(4)}


def test_a_step_with_a_missing_episode_is_not_in_the_index(archive: Archive, caplog: pytest.LogCaptureFixture) -> None:
    archive.append(0, batch(0)[:2])
    archive.append(1, batch(1))
    archive.commit(2, {0: groups_of(0), 1: groups_of(1)})
    assert sorted(indexed(archive)) == [1]
    assert "step 0 is not in the archive: 0/train/1#0" in caplog.text


def test_a_repeat_is_harmless_and_repairs_what_was_damaged(archive: Archive) -> None:
    archive.append(2, batch(2))
    archive.append(2, batch(2))
    flip(path_of(archive, 2), 40)
    archive.append(2, batch(2))
    assert list(archive.read(2, names(2))) == names(2)
    assert len(list((archive.folder / "batches").iterdir())) == 2


def test_the_oldest_steps_go_first_and_uncommitted_ones_stay(archive: Archive) -> None:
    filled(archive, 6, committed=4)
    size = sum(path_of(archive, step).stat().st_size for step in range(6))
    assert archive.prune(size - 1) == [0]
    assert archive.prune(0) == [1, 2, 3]
    assert (archive.steps(), indexed(archive)) == ([4, 5], {})
    assert list(archive.read(5, names(5))) == names(5)


def test_a_file_that_another_process_deletes_meanwhile_is_passed_over(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(archive, 3, committed=2)
    listing = list(archive.files())
    path_of(archive, 0).unlink()
    monkeypatch.setattr(archive, "files", lambda: iter(listing))
    archive.commit(3, {2: groups_of(2)})
    assert archive.prune(0) == [1, 2]


def test_an_episode_whose_file_another_process_deletes_meanwhile_is_refused(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that a fence is about to stop reads on for a while."""
    filled(archive, 1, committed=0).read(0, names(0))
    listing = list(archive.files())
    path_of(archive, 0).unlink()
    monkeypatch.setattr(archive, "files", lambda: iter(listing))
    with pytest.raises(BadPayload, match="another process has deleted it"):
        archive.read(0, names(0))


def test_without_room_committed_batches_are_not_kept(tmp_path: Path) -> None:
    archive = filled(Archive(tmp_path / "archive"), 3, committed=2)
    assert (archive.steps(), indexed(archive)) == ([2], {})


def test_before_anything_is_appended_there_is_nothing(archive: Archive) -> None:
    archive.rewind(0)
    archive.append(0, [])
    assert not archive.folder.exists()
    assert (archive.steps(), archive.read(0, []), archive.verify(), len(archive.index())) == ([], {}, [], 0)
    with pytest.raises(BadPayload, match=r"e: not in the archive .*, step 0"):
        archive.read(0, ["e"])


def test_only_the_owner_may_read(archive: Archive) -> None:
    filled(archive, 1)
    assert stat.S_IMODE(archive.folder.stat().st_mode) == 0o700
    files = [path for path in archive.folder.rglob("*") if path.is_file()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 2


def test_what_was_appended_outlives_the_machine(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is durable once its folder is synced."""
    synced: list[tuple[str, int]] = []

    def counted(path: Path) -> None:
        fsync_path(path)
        synced.append((path.name, len(list(path.iterdir()))))

    monkeypatch.setattr(module, "fsync_path", counted)
    for step in (1, 2):
        archive.append(step, batch(step))
    assert synced == [("run", 1), ("archive", 1), ("archive", 2), ("batches", 1), ("batches", 2)]
    archive.append(2, batch(2))
    assert synced[5:] == [("batches", 2)], "the life that renamed it may have been killed before it was synced"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_a_later_format(path: Path) -> None:
    """A file of another build: everything else is right."""
    table = pq.read_table(path).replace_schema_metadata({"penstock.archive": "2"})
    pq.write_table(table, path)
    path.rename(path.with_name(f"{path.name[:18]}{sha256(path.read_bytes()).hexdigest()[:32]}.parquet"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: flip(path, 50), "its bytes are not those of its name"),
    "empty": (lambda path: os.truncate(path, 0), "its bytes are not those of its name"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "its bytes are not those of its name"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "its bytes are not those of its name"),
    "format": (of_a_later_format, "archive format 2 is unknown; this build reads format 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_never_counted(archive: Archive, damage: str) -> None:
    archive.append(0, batch(0)[:2])
    change, said = DAMAGES[damage]
    change(path_of(archive, 0))
    archive.append(0, batch(0)[2:])
    for reader in (archive, Archive(archive.folder)):
        assert list(reader.read(0, names(0)[2:])) == names(0)[2:]
        with pytest.raises(BadPayload, match=f"not in .*; files that cannot be read: 00000000-00000001-.*: {said}"):
            reader.read(0, names(0))
    assert [said in fault for fault in archive.verify()] == [True]
    archive.commit(1, {0: groups_of(0)})
    assert indexed(archive) == {}


def test_verify_names_what_the_index_has_and_the_batches_have_not(archive: Archive) -> None:
    filled(archive, 2)
    path_of(archive, 1).unlink()
    (archive.folder / "batches" / f"00000001-00000009-{'0' * 32}.parquet.tmp").write_bytes(b"half")
    faults = archive.verify()
    assert faults[0].endswith("never finished; its writer died")
    assert [fault.partition(": not in")[0] for fault in faults[1:]] == [f"index: step 1, {name}" for name in names(1)]
    archive.rewind(2)
    assert not list(archive.folder.rglob("*.tmp"))


def test_a_torn_or_foreign_index_is_refused_by_name(archive: Archive) -> None:
    filled(archive, 1)
    path = archive.folder / "index" / "00000000.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    for call in (archive.index, lambda: archive.rewind(0), lambda: archive.prune(0)):
        with pytest.raises(BadPayload, match=r"00000000.parquet: no whole Parquet file"):
            call()
    assert archive.verify()[0].startswith("00000000.parquet: no whole Parquet file")
    pq.write_table(pq.read_table(archive.folder / "batches").replace_schema_metadata(), path)
    with pytest.raises(BadPayload, match="archive format none is unknown; this build reads format 1"):
        archive.index()


@pytest.mark.parametrize("begun", [True, False])
def test_a_full_disk_leaves_no_half_file_and_a_repeat_succeeds(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def full(path: Path, parts: object) -> None:
        if begun:
            path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_synced", full)
        with pytest.raises(OSError, match="No space left"):
            archive.append(1, batch(1))
    assert list((archive.folder / "batches").iterdir()) == []
    archive.append(1, batch(1))
    assert list(archive.read(1, names(1))) == names(1)


def test_threads_append_and_read_at_once(archive: Archive) -> None:
    """Each reads its own back at once; nobody's append takes another's name."""

    def work(thread: int) -> None:
        for step in range(4):
            archive.append(step, [one(f"{thread}/{step}")])
            assert list(archive.read(step, [f"{thread}/{step}"])) == [f"{thread}/{step}"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [None] * 6
    assert len(list(archive.files())) == 24


SOURCE = Path(__file__).parents[2] / "src"
WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_archive import Archive, batch, groups_of

archive, step = Archive(Path(sys.argv[1]), "", 1 << 30), int(sys.argv[2])
archive.rewind(step)
while True:
    archive.append(step, batch(step))
    archive.commit(step + 1, {number: groups_of(number) for number in range(max(0, step - 3), step + 1)})
    print(step, flush=True)
    step += 1
"""


def write_until_killed(folder: Path, first: int, chance: random.Random) -> int:
    """Runs a writer from step `first`, kills it some steps later in the midst of one; returns the acknowledged."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(chance.randrange(1, 5))]
        timer = threading.Timer(chance.uniform(0.0, 0.02), process.kill)
        timer.start()
        said += process.stdout.readlines()
        timer.join()
    assert process.returncode == -9
    return int(said[-1])


@pytest.mark.crash
def test_a_writer_killed_again_and_again(tmp_path: Path) -> None:
    """Every step that was acknowledged stands in the index once; a step under way is there whole or not at all."""
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance, folder, first = random.Random(seed), tmp_path / "archive", 0
    for _ in range(int(os.environ.get("PENSTOCK_TEST_KILLS", "4"))):
        acknowledged = write_until_killed(folder, first, chance)
        found = indexed(Archive(folder))
        assert list(found) in (list(range(acknowledged + 1)), list(range(acknowledged + 2)))
        assert all(episodes == names(step) for step, episodes in found.items())
        assert [fault for fault in Archive(folder).verify() if "never finished" not in fault] == []
        first = acknowledged + 1 - chance.randrange(2)  # the last one may be trained again
