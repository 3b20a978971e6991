"""What is said of a child process that ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.common import describe_exit
from penstock.rollout_server.engines.child import Child


async def ended(folder: Path, script: str) -> Child:
    child = Child("it", folder / "it.log")
    await child.spawn(["sh", "-c", script], os.environ)
    assert child.process is not None
    await child.process.wait()
    return child


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "was killed (signal 9), perhaps by the kernel for want of memory"),
        (137, "was killed (signal 9), perhaps by the kernel for want of memory"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (3, "ended with exit status 3"),
        (0, "ended with exit status 0"),
    ],
)
def test_every_exit_has_its_words(status: int, words: str) -> None:
    assert describe_exit(status) == words


async def test_the_tail_is_of_this_start_and_says_how_it_ended(tmp_path: Path) -> None:
    await ended(tmp_path, "echo an older start")
    child = Child("it", tmp_path / "it.log")
    assert (child.alive, child.end_of_it, child.tail()) == (False, "", "an older start")
    child = await ended(tmp_path, "seq 1 100; kill -9 $$")
    assert child.tail(2).splitlines() == ["99", "100", f"it {describe_exit(-9)}"]


async def test_child_log_is_private(tmp_path: Path) -> None:
    (tmp_path / "it.log").touch(mode=0o644)
    await ended(tmp_path, "true")
    assert (tmp_path / "it.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("Subprocess scheduler (pid=7) crashed with exit code -9. Triggering SIGQUIT", "was killed (signal 9)"),
        ("Scheduler 7 terminated with -11", "was ended by SIGSEGV"),
        ("engine core exited unexpectedly; starting cleanup", "lost a process that said nothing: it was killed"),
        ("EngineCore encountered a fatal error\nengine core exited unexpectedly", "ended with exit status 0"),
    ],
)
async def test_the_end_of_a_process_behind_it_is_found_in_the_log(tmp_path: Path, log: str, words: str) -> None:
    child = await ended(tmp_path, f"echo '{log}'")
    assert child.end_of_it.startswith(words)


async def test_the_cause_is_the_first_exception_that_is_no_warning(tmp_path: Path) -> None:
    child = await ended(
        tmp_path, "echo 'WARNING ValueError: harmless'; echo 'x RuntimeError: no room'; echo 'KeyError: 1'"
    )
    assert child.cause() == f"RuntimeError: no room (see {child.log_path})"
