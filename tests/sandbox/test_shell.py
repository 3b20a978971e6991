"""The shell that a session keeps, on every backend."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sandbox.backends import BACKENDS, OWN_BOXES, sandbox_of

from penstock.sandbox import Sandbox, Session
from penstock.sandbox.inside import shell


@pytest_asyncio.fixture(params=BACKENDS)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    async with sandbox_of(request.param) as sandbox:
        session = await sandbox.start("a test")
        yield session
        await session.close()


async def told(session: Session, command: str, timeout_s: float = 5.0) -> tuple[str, str, int | None, bool]:
    result = await session.run_shell(command, timeout_s=timeout_s)
    return result.stdout, result.stderr, result.exit_code, result.state_lost


async def test_directory_variables_functions_and_options_live_on(session: Session) -> None:
    first = await told(
        session, "mkdir -p 'a b' && cd 'a b' && X='1 2'; f() { echo f$1; }; declare -A m=([k]=v)\nset -f"
    )
    assert first == ("", "", 0, False)
    assert await told(session, 'echo "${PWD##*/} $X ${m[k]}" *; f 4') == ("a b 1 2 v *\nf4\n", "", 0, False)


async def test_output_exit_codes_and_the_last_status(session: Session) -> None:
    assert await told(session, "echo out; echo err >&2; (exit 3)") == ("out\n", "err\n", 3, False)
    assert await told(session, "echo $?") == ("3\n", "", 0, False)
    stdout, stderr, exit_code, _ = await told(session, "no-such-program")
    assert (stdout, exit_code) == ("", 127)
    assert "no-such-program: command not found" in stderr
    assert "it's" in (await told(session, 'echo "it\'s"'))[0]


@pytest.mark.parametrize(
    "code", ["if then", "echo 'open", "cat <<END", "break; continue", "for x in 1 2; do echo", "\\"]
)
async def test_what_is_left_open_ends_with_its_call(session: Session, code: str) -> None:
    await told(session, "X=1")
    await told(session, code)
    assert await told(session, "echo $X") == ("1\n", "", 0, False)


async def test_commands_read_nothing_and_see_none_of_our_pipes(session: Session) -> None:
    assert await told(session, "cat; read x; echo $?") == ("1\n", "", 0, False)
    listed = (await told(session, "ls -l /proc/self/fd"))[0]
    assert listed.count("pipe:") == 2
    assert "9 ->" not in listed


async def test_exit_ends_the_shell_and_says_so(session: Session) -> None:
    await told(session, "X=1; cd /")
    assert await told(session, "echo bye; exit 7") == ("bye\n", "", 7, True)
    assert await told(session, 'echo "[$X]"') == ("[]\n", "", 0, False)


async def test_a_limit_ends_the_shell_and_all_that_it_started_but_not_the_interpreter(session: Session) -> None:
    await session.run_python("x = 5")
    await told(session, "X=1; echo kept > file; sleep 61 &")
    result = await session.run_shell("echo before; sleep 62", timeout_s=0.4)
    assert (result.stdout, result.exit_code, result.limit) == ("before\n", None, "wall")
    assert (result.state_lost, result.files_lost) == (True, False)
    assert await told(session, 'cat file; echo "[$X]"') == ("kept\n[]\n", "", 0, False)
    assert (await session.run_python("x")).stdout == "5\n"


@pytest.mark.bwrap
async def test_nothing_of_a_stopped_shell_runs_on(sandbox: Sandbox) -> None:
    session = await sandbox.start("daemons")
    await session.run_shell("(setsid sleep 61 &) ; sleep 62 & disown; true")
    assert "sleep" in (await session.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout
    assert (await session.run_shell("sleep 63", timeout_s=0.3)).limit == "wall"
    assert "sleep" not in (await session.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout


async def test_the_interpreters_end_leaves_the_shell_alone(session: Session) -> None:
    await told(session, "X=1")
    assert (await session.run_python("while True: pass", timeout_s=0.3)).state_lost
    assert await told(session, "echo $X") == ("1\n", "", 0, False)


@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_the_loss_of_a_whole_box_is_told_once_to_each(session: Session) -> None:
    await session.run_python("x = 1")
    await told(session, "X=1; echo > file")
    task = session.stream(["sh", "-c", "echo started; exec sleep 60"], timeout_s=60.0)
    await anext(task)  # given up before that, it costs the box nothing
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(task), 0.2)
    first = await session.run_shell('echo "[$X]"; ls')
    assert (first.stdout, first.state_lost, first.files_lost) == ("[]\n", True, True)
    second = await session.run_python("1")
    assert (second.state_lost, second.files_lost) == (True, False)
    third = await session.run(["true"])
    assert (third.state_lost, third.files_lost) == (False, False)


async def test_a_call_cannot_say_how_a_later_one_ended(session: Session) -> None:
    forger = "(while sleep 0.01; do printf '%010d%010d' 7 0 > /proc/$$/fd/9; done) 2>/dev/null >&2 & true"
    await session.run_shell(forger)
    assert await told(session, "sleep 0.3; (exit 5)") == ("", "", 5, False)


async def test_a_nul_is_an_observation(session: Session) -> None:
    assert await told(session, "echo a\0b") == ("", "the command holds a NUL character\n", 1, False)
    assert await told(session, "echo a") == ("a\n", "", 0, False)


def test_the_plain_shell_of_a_box_without_bash_understands_the_same_requests(tmp_path: Path) -> None:
    calls = [shell.request(7, "cd /; x=1; (exit 3)", 0), shell.request(8, """echo $? $x $PWD; cat; echo "it's" """, 3)]
    feed = shell.PRELUDE + b"".join(calls) + shell.request(9, "if", 0)
    done = subprocess.run(
        ["sh", "-c", "exec sh 9>outcomes"], input=feed, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.stdout == b"3 1 /\nit's\n"
    assert (tmp_path / "outcomes").read_text() == "".join(
        f"{n:010d}{code:010d}" for n, code in ((7, 3), (8, 0), (9, 2))
    )
