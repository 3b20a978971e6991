"""A version on one machine: verified once, mapped by all of its readers, also after damage, exchange and kills."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.weight_sync.conftest import altered, next_version, open_files, other_checksum, reorder_header, small_tensors

torch = pytest.importorskip("torch")

from penstock.common import FileLock
from penstock.weight_sync import Manifest, WeightPublisher, WeightReader, WeightsRefused, WeightsUnreachable
from penstock.weight_sync.files import reader as reader_module

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="memfd")]


@pytest.fixture
def records(own_records: Path) -> Path:
    return own_records / f"penstock-verified-{os.geteuid()}"


def published(folder: Path, version: int = 1, seed: int = 0, **settings: Any) -> Manifest:
    return WeightPublisher(folder / "published", "shm", **settings).write(version, small_tensors(seed).items())


def check_holds(version: Any, tensors: dict[str, Any]) -> None:
    assert sorted(version) == sorted(tensors)
    for name, tensor in tensors.items():
        assert version[name].dtype == tensor.dtype
        assert torch.equal(version[name], tensor), name


def test_two_readers_at_once_verify_once_and_map_the_file(tmp_path: Path) -> None:
    manifest, found = published(tmp_path), {}
    readers = [WeightReader() for _ in range(4)]
    threads = [threading.Thread(target=lambda n=n: found.update({n: readers[n].read(manifest)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(reader.verified for reader in readers) == 1
    assert {os.fstat(version.descriptor).st_ino for version in found.values()} == {os.stat(manifest.place).st_ino}
    for version in found.values():
        check_holds(version, small_tensors())


READER = """
import json, sys, time
from pathlib import Path
from penstock.weight_sync import Manifest, WeightReader, checksum
from penstock.weight_sync.files import reader as module
module.SHARED_MEMORY = Path(sys.argv[3])
if sys.argv[2] == "slow":
    def verify(*_):
        print("reading", flush=True)
        time.sleep(600)
    module.verified_pieces = module.verify_tensors = verify
reader = WeightReader()
version = reader.read(Manifest.parse(json.loads(sys.argv[1])))
print(json.dumps([reader.verified, {name: checksum(version[name]) for name in version}]), flush=True)
"""


def read_elsewhere(manifest: Manifest, how: str, folder: Path) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", READER, json.dumps(manifest.as_dict()), how, str(folder)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


@pytest.fixture(params=["full", "delta"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> Manifest:
    publisher = WeightPublisher(tmp_path / "published", "shm", full_every=8)
    first = publisher.write(1, small_tensors().items())
    if request.param == "full":
        return first
    return publisher.write(2, next_version(small_tensors(), 2).items())


def test_another_process_maps_what_this_one_verified(manifest: Manifest, own_records: Path) -> None:
    reader = WeightReader()
    version = reader.read(manifest)
    said, _ = read_elsewhere(manifest, "at once", own_records).communicate(timeout=120)
    assert json.loads(said) == [0, {entry.name: entry.xxh3 for entry in manifest.tensors}]
    assert sorted(version) == sorted(manifest.entries)


def test_reader_killed_while_it_verifies_leaves_the_work_to_the_next(manifest: Manifest, own_records: Path) -> None:
    process = read_elsewhere(manifest, "slow", own_records)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    reader, found = WeightReader(), []
    waiting = threading.Thread(target=lambda: found.append(reader.read(manifest)))
    waiting.start()
    waiting.join(0.2)
    assert (waiting.is_alive(), reader.verified) == (True, 0)
    process.kill()
    waiting.join(60)
    process.communicate(timeout=60)
    assert reader.verified == 1
    assert sorted(found[0]) == sorted(manifest.entries)


@pytest.mark.parametrize("write", [Path.write_bytes, lambda path, raw: path.with_name("new").write_bytes(raw)])
def test_file_that_was_changed_or_exchanged_is_verified_again(tmp_path: Path, write: Any) -> None:
    manifest = published(tmp_path)
    path = Path(manifest.place)
    version = WeightReader().read(manifest)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    write(path, bytes(raw))
    if path.with_name("new").exists():
        path.with_name("new").rename(path)
        version.check_unchanged()
        check_holds(version, small_tensors())
    else:
        with pytest.raises(WeightsRefused, match="was changed after it was verified"):
            version.check_unchanged()
    for _ in range(2):
        with pytest.raises(WeightsRefused, match="checksum"):
            WeightReader().read(manifest)


def test_removed_file_changes_nothing_for_those_that_mapped_it(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    version = WeightReader().read(manifest)
    Path(manifest.place).unlink()
    version.check_unchanged()
    check_holds(version, small_tensors())
    with pytest.raises(WeightsRefused, match="No such file"):
        WeightReader().read(manifest)


def test_damaged_version_is_refused_by_every_reader(tmp_path: Path) -> None:
    manifest = altered(published(tmp_path), other_checksum)
    for _ in range(2):
        reader = WeightReader()
        with pytest.raises(WeightsRefused, match=manifest.tensors[0].name):
            reader.read(manifest)
        assert reader.verified == 1


def test_file_of_other_bytes_is_refused_though_its_tensors_are_recorded(tmp_path: Path) -> None:
    """They mean the same, so that no tensor is to blame."""
    manifest = published(tmp_path)
    WeightReader().read(manifest)
    reorder_header(Path(manifest.place))
    with pytest.raises(WeightsRefused, match=r"weights-00000001\.safetensors has checksum"):
        WeightReader().read(manifest)


def test_changed_tensor_is_a_copy_of_this_process(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    WeightReader().read(manifest)["embed"].zero_()
    reader = WeightReader()
    check_holds(reader.read(manifest), small_tensors())
    assert reader.verified == 0


def test_tensors_outlive_their_version(tmp_path: Path) -> None:
    embed = WeightReader().read(published(tmp_path))["embed"]
    assert torch.equal(embed, small_tensors()["embed"])


def test_holder_that_hangs_is_not_waited_for_for_ever(
    manifest: Manifest, records: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    WeightReader().read(manifest)
    monkeypatch.setattr(reader_module, "WAIT_S", 0.1)
    monkeypatch.setattr(reader_module, "WAIT_BYTES_PER_S", 1e12)
    locks = [FileLock(path, "hangs") for path in records.iterdir()]
    for lock in locks:
        lock.acquire()
    reader = WeightReader()
    assert sorted(reader.read(manifest)) == sorted(manifest.entries)
    assert reader.verified == 1
    assert "verified by this process too" in caplog.text
    for lock in locks:
        lock.release()


def test_folder_of_records_that_others_may_enter_is_not_used(
    tmp_path: Path, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records.mkdir(mode=0o755)
    manifest, readers = published(tmp_path), [WeightReader(), WeightReader()]
    for reader in readers:
        check_holds(reader.read(manifest), small_tensors())
    assert [reader.verified for reader in readers] == [1, 1]
    assert "0700" in caplog.text


def test_version_that_cannot_be_recorded_is_read(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a full /dev/shm, which is small in containers."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reader_module, "append_jsonl", full)
    for reader in (WeightReader(), WeightReader()):
        assert sorted(reader.read(manifest)) == sorted(manifest.entries)
        assert reader.verified == 1
    assert "No space left" in caplog.text


def test_old_records_are_removed(tmp_path: Path, records: Path) -> None:
    WeightReader().read(published(tmp_path))
    (old,) = records.iterdir()
    os.utime(old, (0, 0))
    WeightReader().read(published(tmp_path, 2, seed=2))
    assert old not in list(records.iterdir())


def test_merged_version_of_a_process_that_dropped_it_is_merged_again(tmp_path: Path) -> None:
    publisher, tensors = WeightPublisher(tmp_path / "published", "shm", full_every=8), small_tensors()
    publisher.write(1, tensors.items())
    tensors = next_version(tensors, 2)
    manifest = publisher.write(2, tensors.items())
    first = WeightReader()
    first.read(manifest)
    first.forget()
    reader = WeightReader()
    check_holds(reader.read(manifest), tensors)
    assert reader.verified == 1


def test_same_weights_under_another_number_are_not_read_again(tmp_path: Path) -> None:
    publisher, reader = WeightPublisher(tmp_path / "published", "shm", full_every=8), WeightReader()
    first = reader.read(publisher.write(1, small_tensors().items()))
    again = reader.read(publisher.write(2, small_tensors().items()))
    assert (first.version, again.version, reader.verified) == (1, 2, 1)
    del first
    check_holds(again, small_tensors())


def test_held_version_whose_file_was_changed_is_of_no_use(tmp_path: Path) -> None:
    publisher, reader = WeightPublisher(tmp_path / "published", "shm", full_every=8), WeightReader()
    manifest = publisher.write(1, small_tensors().items())
    reader.read(manifest)
    whole = Path(manifest.place).read_bytes()
    Path(manifest.place).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightsRefused, match="checksum"):
        reader.read(publisher.write(2, small_tensors().items()))


def test_version_that_is_held_of_another_chain_is_of_no_use(tmp_path: Path) -> None:
    reader = WeightReader()
    reader.read(published(tmp_path / "a", full_every=8))
    publisher, tensors = WeightPublisher(tmp_path / "b", "shm", full_every=8), small_tensors(5)
    publisher.write(1, tensors.items())
    tensors = next_version(tensors, 2)
    check_holds(reader.read(publisher.write(2, tensors.items())), tensors)


def test_received_version_is_shared_until_it_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first worker of a server shares a broadcast; here what it holds came from a file."""
    manifest = published(tmp_path)
    holder, other = WeightReader(), WeightReader()
    version = holder.read(manifest)
    holder.share(manifest, version)
    check_holds(other.shared(manifest), small_tensors())
    assert other.verified == 0
    del version
    monkeypatch.setattr(reader_module, "SHARE_S", 0.2)
    with pytest.raises(WeightsUnreachable, match="no worker shares"):
        other.shared(manifest)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plain: plain["tensors"].append(plain["tensors"][0] | {"name": "more"}), "'more' is missing"),
        (lambda plain: plain["tensors"].pop(), "'last' is not in the manifest"),
        (lambda plain: plain["tensors"][0].update(shape=[300, 200]), "'embed' has shape"),
        (lambda plain: plain["tensors"][0].update(dtype="float16"), "'embed' is bfloat16"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_refused_version_names_the_tensor_and_leaves_nothing_open(
    tmp_path: Path, own_records: Path, change: Any, problem: str
) -> None:
    manifest = published(tmp_path)
    before = open_files(tmp_path, own_records)
    with pytest.raises(WeightsRefused, match=problem):
        WeightReader().read(altered(manifest, change))
    assert open_files(tmp_path, own_records) == before


def test_delta_that_leads_elsewhere_is_refused_by_tensor_and_leaves_nothing_open(
    tmp_path: Path, own_records: Path
) -> None:
    publisher, reader = WeightPublisher(tmp_path / "published", "shm", full_every=8), WeightReader()
    reader.read(publisher.write(1, small_tensors().items()))
    manifest = publisher.write(2, next_version(small_tensors(), 2).items())
    reader.forget()
    before = open_files(tmp_path, own_records)
    with pytest.raises(WeightsRefused, match="'last' has checksum"):
        reader.read(altered(manifest, other_checksum))
    assert open_files(tmp_path, own_records) == before
