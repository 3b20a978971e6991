"""One verified copy per machine: who reads, who maps, what a killed or lying holder leaves, what cannot change it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.weight_sync.conftest import altered, next_version, other_checksum, small_tensors

torch = pytest.importorskip("torch")

from tests.weight_sync.files.node_parts import check_holds, check_is_free, published

from penstock.weight_sync import (
    Manifest,
    NodeReader,
    WeightPublisher,
    WeightsRefused,
    WeightsUnreachable,
    stream_layout,
)
from penstock.weight_sync.files.node_copy import VersionLease, lease_name

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets")]


def test_two_readers_at_once_read_the_file_once(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    readers, found = [NodeReader() for _ in range(4)], {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: readers[n].read(manifest)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(reader.verified for reader in readers) == 1
    assert len({os.fstat(memory.descriptor).st_ino for memory in found.values()}) == 1
    for memory in found.values():
        check_holds(memory, small_tensors())
    for reader in readers:
        reader.close()


def test_what_was_verified_can_be_neither_changed_nor_cut(tmp_path: Path) -> None:
    reader = NodeReader()
    memory = reader.read(published(tmp_path))
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 10)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, 0)
    memory["embed"].zero_()  # of this process's pages alone
    check_holds(NodeReader().read(published(tmp_path)), small_tensors())
    reader.close()
    (tmp_path / "weights-00000001.safetensors").write_bytes(b"")
    check_holds(memory, small_tensors())


def test_tensors_outlive_the_memory_that_they_are_views_of(tmp_path: Path) -> None:
    reader = NodeReader()
    embed = reader.read(published(tmp_path))["embed"]
    reader.close()
    assert torch.equal(embed, small_tensors()["embed"])


def test_a_version_is_mapped_whole_before_its_load_and_not_after(tmp_path: Path) -> None:
    reader = NodeReader()
    memory = reader.read(published(tmp_path, 4321))
    memory.map_all()
    assert mappings(4321)
    check_holds(memory, small_tensors())
    memory.unmap()
    assert not mappings(4321)
    check_holds(memory, small_tensors())
    reader.close()


def mappings(version: int) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:weights-{version} " in line]


HOLDER = """
import sys, time
from penstock.weight_sync.files.node_copy import VersionLease
lease = VersionLease.take(sys.argv[1])
print(lease is not None, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder() -> Any:
    """Starts a process that has a lease and never hands anything out."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        code = HOLDER.replace("sys.argv[1]", repr(name))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_holder_killed_while_it_reads_leaves_the_work_to_the_next(tmp_path: Path, holder: Any) -> None:
    manifest = published(tmp_path)
    process = holder(lease_name(manifest.state))
    reader, found = NodeReader(), []
    waiting = threading.Thread(target=lambda: found.append(reader.read(manifest)))
    waiting.start()
    time.sleep(0.2)
    assert (waiting.is_alive(), reader.verified) == (True, 0)
    process.send_signal(signal.SIGKILL)
    waiting.join(60)
    assert reader.verified == 1
    check_holds(found[0], small_tensors())
    reader.close()


READER = """
import json, sys, time
from penstock.weight_sync import Manifest, NodeReader, checksum
from penstock.weight_sync.files import version_memory
if sys.argv[2] == "slow":
    put = version_memory.MemoryDraft.put
    def put_slowly(self, piece, at):
        put(self, piece, at)
        print("reading", flush=True)
        time.sleep(600)
    version_memory.MemoryDraft.put = put_slowly
reader = NodeReader()
memory = reader.read(Manifest.parse(json.loads(sys.argv[1])))
print(json.dumps([reader.verified, {name: checksum(memory[name]) for name in memory}]), flush=True)
"""


def test_another_process_maps_what_this_one_verified(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    reader = NodeReader()
    memory = reader.read(manifest)
    process = read_elsewhere(manifest, "at once")
    said, _ = process.communicate(timeout=120)
    assert json.loads(said) == [0, {entry.name: entry.xxh3 for entry in manifest.tensors}]
    check_holds(memory, small_tensors())
    reader.close()


def test_a_reader_killed_between_two_pieces_is_followed_by_one_that_checks_all(tmp_path: Path) -> None:
    manifest = published(tmp_path)
    process = read_elsewhere(manifest, "slow")
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    reader, found = NodeReader(), []
    waiting = threading.Thread(target=lambda: found.append(reader.read(manifest)))
    waiting.start()
    time.sleep(0.2)
    assert reader.verified == 0
    process.kill()
    waiting.join(60)
    process.communicate(timeout=60)
    assert reader.verified == 1
    check_holds(found[0], small_tensors())
    reader.close()


def read_elsewhere(manifest: Manifest, how: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", READER, json.dumps(manifest.as_dict()), how]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


def test_a_holder_that_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.WAIT_S", 0.1)
    manifest = published(tmp_path)
    holder(lease_name(manifest.state))
    reader = NodeReader()
    check_holds(reader.read(manifest), small_tensors())
    assert reader.verified == 1


def test_a_file_that_cannot_be_sealed_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = published(tmp_path)
    lease = VersionLease.take(lease_name(manifest.state))
    assert lease is not None
    pipe = os.pipe()
    lease.hand_out(pipe[0])
    reader = NodeReader()
    check_holds(reader.read(manifest), small_tensors())
    assert "its holder hands out a file that cannot be sealed" in caplog.text
    lease.close()
    for end in pipe:
        os.close(end)


def test_a_holder_of_this_user_in_another_group_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, readers = published(tmp_path), [NodeReader(), NodeReader()]
    said = struct.pack("3i", os.getpid(), os.geteuid(), os.getegid() + 1)
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: said)
    for reader in readers:
        reader.read(manifest)
    assert [reader.verified for reader in readers] == [1, 0]
    for reader in readers:
        reader.close()


def test_a_holder_that_hands_out_nothing_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.WAIT_S", 0.1)
    manifest = published(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(lease_name(manifest.state))
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"v")

        answering = threading.Thread(target=answer)
        answering.start()
        reader = NodeReader()
        check_holds(reader.read(manifest), small_tensors())
        listener.shutdown(socket.SHUT_RDWR)
        answering.join(60)
    assert reader.verified == 1


def test_a_holder_is_waited_for_as_long_as_the_version_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.WAIT_S", 0.0)
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.WAIT_BYTES_PER_S", 1e3)
    manifest = published(tmp_path)
    held = VersionLease.take(lease_name(manifest.state))
    assert held is not None
    reader, found = NodeReader(), []
    waiting = threading.Thread(target=lambda: found.append(reader.read(manifest)))
    waiting.start()
    time.sleep(0.1)  # for it to wait by now; where it does not yet, the test shows less
    assert (waiting.is_alive(), reader.verified) == (True, 0)
    held.close()
    waiting.join(60)
    assert reader.verified == 1
    check_holds(found[0], small_tensors())
    reader.close()


def test_a_lease_outlives_its_version_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.LINGER_S", 600.0)
    manifest, readers = published(tmp_path), [NodeReader() for _ in range(3)]
    for reader in readers:
        reader.read(manifest)
        reader.done()
    assert [reader.verified for reader in readers] == [1, 0, 0]
    for reader in readers:
        reader.close()


def test_a_lease_that_is_done_with_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINGER_S", "ACCEPT_S"):
        monkeypatch.setattr(f"penstock.weight_sync.files.node_copy.{name}", 0.01)
    reader, manifest = NodeReader(), published(tmp_path)
    reader.read(manifest)
    assert VersionLease.take(lease_name(manifest.state)) is None
    reader.done()
    check_is_free(manifest.state)


def test_a_lease_ends_with_the_next_version_and_with_its_reader(tmp_path: Path) -> None:
    first, second = published(tmp_path, 1), WeightPublisher(tmp_path, "shm").write(2, small_tensors(2).items())
    names = [f"received-{os.getpid()}-{number}" for number in range(2)]
    reader = NodeReader()
    memory = reader.read(first)
    reader.read(second)
    check_is_free(first.state)
    reader.share(memory, names[0])
    check_is_free(second.state)
    reader.share(memory, names[1])
    check_is_free(names[0])
    assert VersionLease.take(lease_name(names[1])) is None
    for _ in range(2):
        reader.close()
    check_is_free(names[1])


def test_a_lease_that_cannot_be_had_costs_the_others_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names of such sockets are short."""
    reader, manifest = NodeReader(), published(tmp_path)
    memory = reader.read(manifest)
    reader.share(memory, "x" * 200)
    assert "version 1 cannot be handed to this machine's other workers: it cannot be had: " in caplog.text
    with pytest.raises(WeightsUnreachable, match="version 1: what was received: its holder cannot be asked: "):
        reader.shared(manifest, "x" * 200, stream_layout(manifest))
    reader.close()


def test_same_weights_of_another_number_are_not_read_again(tmp_path: Path) -> None:
    publisher, reader = WeightPublisher(tmp_path, "shm", full_every=8), NodeReader()
    first = reader.read(publisher.write(1, small_tensors().items()))
    again = reader.read(publisher.write(2, small_tensors().items()))
    assert (first.version, again.version, reader.verified) == (1, 2, 1)
    del first
    check_holds(again, small_tensors())
    reader.close()


def test_what_is_held_of_another_chain_is_of_no_use(tmp_path: Path) -> None:
    reader = NodeReader()
    reader.read(published(tmp_path / "a", full_every=8))
    publisher, tensors = WeightPublisher(tmp_path / "b", "shm", full_every=8), small_tensors(5)
    publisher.write(1, tensors.items())
    tensors = next_version(tensors, 2)
    check_holds(reader.read(publisher.write(2, tensors.items())), tensors)
    reader.close()


@pytest.mark.parametrize("size", [None, 64])
def test_memory_that_is_not_sealed_or_of_another_size_is_not_taken(tmp_path: Path, size: int | None) -> None:
    manifest = published(tmp_path)
    lease = VersionLease.take(lease_name(manifest.state))
    assert lease is not None
    given = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    if size is None:
        os.ftruncate(given, 1 << 20)
    else:
        os.ftruncate(given, size)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(given, fcntl.F_ADD_SEALS, seals)
    lease.hand_out(given)
    reader = NodeReader()
    check_holds(reader.read(manifest), small_tensors())
    assert reader.verified == 1
    reader.close()
    lease.close()
    inode = os.fstat(given).st_ino
    os.close(given)
    assert inode not in _open_inodes(), "what was handed out is closed by both"


@pytest.mark.parametrize("handed_out", [True, False])
def test_a_closed_lease_is_free_at_once(handed_out: bool) -> None:
    name = lease_name(f"closed-{os.getpid()}")
    held = VersionLease.take(name)
    assert held is not None
    if handed_out:
        given = os.memfd_create("other")
        held.hand_out(given)
        os.close(given)
    assert VersionLease.take(name) is None
    held.close()
    again = VersionLease.take(name)
    assert again is not None
    again.close()


def test_holders_that_come_and_go_are_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.WAIT_S", 0.1)
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.VersionLease.take", lambda _name: None)
    monkeypatch.setattr("penstock.weight_sync.files.node_copy.ask_holder", lambda _name, _wait_s: None)
    reader = NodeReader()
    check_holds(reader.read(published(tmp_path)), small_tensors())
    assert reader.verified == 1
    reader.close()


def test_a_lease_of_another_user_is_left_alone(tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = published(tmp_path)
    holder(lease_name(manifest.state))
    monkeypatch.setattr("penstock.weight_sync.files.node_copy._of_this_user", lambda _connection: False)
    reader = NodeReader()
    check_holds(reader.read(manifest), small_tensors())
    assert reader.verified == 1


def test_a_damaged_version_is_refused_by_every_reader(tmp_path: Path) -> None:
    manifest = altered(published(tmp_path), other_checksum)
    for _ in range(2):
        reader = NodeReader()
        with pytest.raises(WeightsRefused, match=manifest.tensors[0].name):
            reader.read(manifest)
        assert reader.verified == 1
    path = tmp_path / "weights-00000001.safetensors"
    whole = published(tmp_path)
    data = bytearray(path.read_bytes())
    data[-2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(WeightsRefused, match=whole.tensors[-1].name):
        NodeReader().read(whole)
    path.write_bytes(data[:-100])
    with pytest.raises(WeightsRefused, match=path.name):
        NodeReader().read(whole)


def test_a_reader_whose_own_path_leads_nowhere_takes_no_copy_of_others(tmp_path: Path) -> None:
    first = NodeReader()
    manifest = published(tmp_path)
    first.read(manifest)
    gone = altered(manifest, lambda plain: plain.update(path=str(tmp_path / "gone.safetensors")))
    with pytest.raises(WeightsRefused, match="No such file"):
        NodeReader().read(gone)
    first.close()


def test_deltas_are_applied_once_to_what_all_hold(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", full_every=8)
    readers, tensors = [NodeReader(), NodeReader()], small_tensors()
    for version in range(1, 5):
        manifest = publisher.write(version, tensors.items())
        (tmp_path / "weights-00000001.safetensors").touch()
        # The one that reads alternates: each has what the other verified before.
        for reader in readers if version % 2 else readers[::-1]:
            check_holds(reader.read(manifest), tensors)
        tensors = next_version(tensors, version + 1)
    assert [reader.verified for reader in readers] == [2, 2]
    late = NodeReader()
    for reader in readers:
        reader.close()
    check_holds(late.read(manifest), {name: late.read(manifest)[name] for name in manifest.entries})
    assert late.verified == 1


def test_a_delta_on_what_is_held_needs_its_own_file_alone(tmp_path: Path) -> None:
    publisher, reader, tensors = WeightPublisher(tmp_path, "shm", full_every=8), NodeReader(), small_tensors()
    reader.read(publisher.write(1, tensors.items()))
    tensors = next_version(tensors, 2)
    manifest = publisher.write(2, tensors.items())
    (tmp_path / "weights-00000001.safetensors").unlink()
    check_holds(reader.read(manifest), tensors)
    reader.close()


def test_a_link_that_is_gone_costs_the_way_from_the_full_version(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", keep=4, full_every=8)
    tensors = small_tensors()
    first = publisher.write(1, tensors.items())
    reader = NodeReader()
    reader.read(first)
    second, third = next_version(tensors, 2), next_version(next_version(tensors, 2), 3)
    publisher.write(2, second.items())
    manifest = publisher.write(3, third.items())
    reader.close()
    reader.read(first)
    check_holds(reader.read(manifest), third)
    assert reader.verified == 3
    reader.close()


def test_what_a_reader_does_not_need_any_more_is_freed(tmp_path: Path) -> None:
    reader = NodeReader()
    manifest = published(tmp_path)
    memory = reader.read(manifest)
    inode = os.fstat(memory.descriptor).st_ino
    reader.done()
    del memory
    reader.close()
    for _ in range(200):
        if not _open_inodes() & {inode}:
            break
        time.sleep(0.05)
    assert inode not in _open_inodes()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect(lease_name(manifest.state))


def _open_inodes() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(entry.stat().st_ino)
        except FileNotFoundError:
            continue
    return found
