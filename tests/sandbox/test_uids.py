"""Uids of boxes, which no two processes share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from penstock.sandbox import SandboxError
from penstock.sandbox.uids import UidBlocks


@pytest.fixture(autouse=True)
def locks(monkeypatch, tmp_path):
    monkeypatch.setattr("penstock.sandbox.uids.LOCKS", (str(tmp_path),))


def test_uids_of_many_slots_are_all_different() -> None:
    uids = UidBlocks(1000, 16, 8)
    assert len({uids.uid(slot) for slot in range(128)}) == 128
    with pytest.raises(SandboxError, match="free"):
        uids.uid(128)


def test_uids_of_processes_with_congruent_pids_differ() -> None:
    """A block is held as long as its process lives, whatever the pid of another one is."""
    first = UidBlocks(1000, 16, 8)
    mine = {first.uid(slot) for slot in range(16)}
    second = UidBlocks(1000, 16, 8)
    assert not mine & {second.uid(slot) for slot in range(16)}


def test_uids_of_a_killed_process_are_free(tmp_path) -> None:
    code = (
        "import sys, penstock.sandbox.uids as uids\n"
        f"uids.LOCKS = ({str(tmp_path)!r},)\n"
        "blocks = uids.UidBlocks(1000, 16, 2)\n"
        "[blocks.uid(slot) for slot in range(32)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert UidBlocks(1000, 16, 2).uid(31) in range(1000, 1032)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the uids of two users")
def test_uids_of_an_ended_worker_of_another_user_are_free(monkeypatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr("penstock.sandbox.uids.LOCKS", (folder,))
        for user in (40001, 40002):
            child = os.fork()
            if not child:
                os.setuid(user)
                os._exit(UidBlocks(1000, 16, 1).uid(0) != 1000)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
