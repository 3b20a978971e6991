"""For ever: loops, sleeps, and who is asked to show what hangs."""

from __future__ import annotations

import shlex

import pytest
from tests.sandbox.attacks.targets import attack, ended_by

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")


IGNORE = (
    "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
)
STOP = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
SLEEPS = ("while True: pass", "import time\ntime.sleep(1e9)", "import signal\nsignal.pause()", STOP)


async def test_attack_for_ever(session: Session) -> None:
    for code in SLEEPS:
        assert ended_by(await attack(session, IGNORE + code, timeout_s=0.2), "wall")
        result = await session.run(["python3", "-c", IGNORE + code], timeout_s=0.2)
        assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", False)
        shell = await session.run_shell(f"trap '' INT TERM HUP; python3 -c {shlex.quote(IGNORE + code)}", timeout_s=0.2)
        assert ended_by(shell, "wall")


async def test_attack_more_processor_time_than_allowed(session: Session) -> None:
    assert ended_by(await attack(session, IGNORE + "while True: pass", timeout_s=60.0), "cpu")


async def test_attack_shell_that_is_held_open(session: Session) -> None:
    """What one call leaves open or redefined harms that session's shell at most, and not for long."""
    for command in (
        "cat <<EOF",
        "echo 'unclosed",
        "command() { :; }",
        "exec 0</dev/zero",
        "exec sleep 1000",
        "kill -STOP $$",
    ):
        await session.run_shell(command, timeout_s=0.3)
        await session.run_shell("exit 3", timeout_s=0.3)
        assert (await session.run_shell("echo served")).stdout == "served\n", command


HANGING_VALUE = "class Hanging:\n    def __repr__(self):\n        while True: pass\nHanging()"
HANGING_ERROR = "class Hanging(Exception):\n    def __str__(self):\n        while True: pass\nraise Hanging"


async def test_attack_what_hangs_when_it_is_shown(session: Session) -> None:
    for code in (HANGING_VALUE, HANGING_ERROR):
        assert ended_by(await attack(session, code, timeout_s=0.3), "wall")
