"""Runs a command and waits for every process that it leaves behind, so that the kernel's account of it is whole.

    python -P reaper.py COMMAND …

bubblewrap ends without waiting for the first process of its box: what the box has spent is charged to its new
parent. Here this is the reaper, whose own account, as a child of the benchmark, then has all of it. SIGTERM and
SIGINT are passed on. It ends with the command's status, when nothing is left or `LEFT_S` after the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from penstock.common import die_with_parent

LEFT_S = 10.0
LOOK_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
FILE = Path(__file__).resolve()


def reaped(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` under a reaper."""
    return [sys.executable, "-P", str(FILE), *command]


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a living process and all below it, waited-for children included; 0 where it has ended.

    A child that ends while this is read may be missed, or counted twice: by what it had spent.
    """
    total = 0.0
    try:
        parent = psutil.Process(root)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> int:
    die_with_parent()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = _start(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda given, _frame: os.kill(command, given))
    status = _until(command)
    _rest()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _start(command: Sequence[str]) -> int:
    """Its process id. It is killed where the reaper is."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(signal.SIGKILL)
        os.execvp(command[0], command)  # noqa: S606 - the command is the benchmark's
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _until(command: int) -> int:
    """Wait for all that end until the command does; its wait status."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == command:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            return status


def _rest() -> None:
    """Those that outlive the command."""
    deadline = time.monotonic() + LEFT_S
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(LOOK_S)  # nothing else waits in this process


if __name__ == "__main__":
    sys.exit(main())
