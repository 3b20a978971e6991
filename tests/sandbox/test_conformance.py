"""The promises of a sandbox session, on every backend: runs, interpreter, shell, streams, files, losses.

By default bubblewrap and the unsafe subprocess keep all of them; a server and containers, which have the same driver
inside, those marked `on_every_backend`. The deep run asks all of all.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.sandbox.backends import BACKENDS, CONFIG, OWN_BOXES, on_every_backend, sandbox_of

from penstock.sandbox import RunResult, Sandbox, SandboxError, SandboxLost, Session, make_sandbox
from penstock.sandbox.inside import shell
from penstock.sandbox.protocol import Output


@pytest_asyncio.fixture(params=BACKENDS)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    async with sandbox_of(request.param) as sandbox:
        session = await sandbox.start("a test")
        yield session
        await session.close()


@on_every_backend
async def test_python_keeps_names_between_calls(session: Session) -> None:
    first = await session.run_python("import math\nx = 20\ndef double(n):\n    return 2 * n")
    second = await session.run_python("print('sum', x + 1)\ndouble(x) + math.floor(2.5)")
    assert (first.stdout, first.stderr, first.exit_code) == ("", "", 0)
    assert (second.stdout, second.exit_code, second.limit, second.state_lost) == ("sum 21\n42\n", 0, None, False)


async def test_python_exception_shows_own_lines_and_keeps_state(session: Session) -> None:
    await session.run_python("x = 1\ndef fail():\n    raise KeyError('k')")
    result = await session.run_python("fail()")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise KeyError('k')" in result.stderr
    assert result.stderr.splitlines()[-1] == "KeyError: 'k'"
    assert "penstock" not in result.stderr
    assert (await session.run_python("x")).stdout == "1\n"


async def test_python_syntax_errors_exits_and_input(session: Session) -> None:
    assert "SyntaxError" in (await session.run_python("1 +")).stderr
    assert (await session.run_python("exit(3)")).exit_code == 3
    assert "EOFError" in (await session.run_python("input()")).stderr


@on_every_backend
async def test_python_timeout_loses_the_state(session: Session) -> None:
    await session.run_python("x = 1")
    result = await session.run_python("import time\nprint('before')\ntime.sleep(600)", timeout_s=5.0)
    assert (result.stdout, result.exit_code, result.limit, result.state_lost) == ("before\n", None, "wall", True)
    assert 5.0 <= result.duration_s < 600.0  # of the sleep
    after = await session.run_python("x")
    assert "NameError" in after.stderr
    assert not after.state_lost


@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_run_accepts_a_limit_of_years(session: Session) -> None:
    assert (await session.run(["true"], timeout_s=1e12)).exit_code == 0


async def test_python_may_end_its_interpreter(session: Session) -> None:
    result = await session.run_python("import os\nos._exit(7)")
    assert (result.exit_code, result.state_lost) == (7, True)
    assert (await session.run_python("1 + 1")).stdout == "2\n"


async def test_output_is_cut_with_room_for_the_traceback(session: Session) -> None:
    result = await session.run_python("print('x' * 100_000)\n1 / 0")
    assert result.limit == "output"
    assert len(result.stdout) + len(result.stderr) <= CONFIG.output_bytes
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_output_that_is_binary_becomes_text(session: Session) -> None:
    result = await session.run_python(r"import os; os.write(1, b'\xff\x00\x1b[31m\xe2\x82'); None")
    assert result.stdout == "�\x00\x1b[31m�"


@on_every_backend
async def test_run_passes_stdin_and_returns_the_exit_code(session: Session) -> None:
    result = await session.run(["sh", "-c", "cat; echo oops >&2; exit 4"], stdin="hälló" * 50_000)
    assert (result.exit_code, result.stderr) == (4, "oops\n")
    assert result.stdout.startswith("hällóhälló")
    assert (await session.run(["no-such-program"])).exit_code == 127
    assert (await session.run(["pwd"], cwd="/usr")).stdout == "/usr\n"
    missing = await session.run(["pwd"], cwd="/nowhere")
    assert (missing.exit_code, missing.stderr) == (126, "/nowhere: No such file or directory\n")


async def test_run_timeout_keeps_the_interpreter(session: Session) -> None:
    await session.run_python("x = 5")
    result = await session.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.2)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", False)
    assert (await session.run_python("x")).stdout == "5\n"


async def test_run_does_not_wait_for_background_processes(session: Session) -> None:
    result = await session.run(["sh", "-c", "sleep 300 & echo started"], timeout_s=200.0)
    assert (result.stdout, result.limit) == ("started\n", None)


@on_every_backend
async def test_files_are_written_and_read(session: Session) -> None:
    data = bytes(range(256)) * 4000
    await session.write_file("folder.bin", data)
    assert await session.read_file("folder.bin") == data
    assert await session.read_file("folder.bin", max_bytes=3) == b"\x00\x01\x02"
    assert (await session.run_python("len(open('folder.bin', 'rb').read())")).stdout == f"{len(data)}\n"
    with pytest.raises(FileNotFoundError):
        await session.read_file("nothing-here")
    with pytest.raises(OSError, match="too long"):
        await session.write_file("n" * 5000, b"")


async def test_files_refuse_a_fifo(session: Session) -> None:
    await session.run_python("import os; os.mkfifo('pipe')")
    with pytest.raises(OSError, match=r"regular|No such device"):
        await session.write_file("pipe", b"x")
    with pytest.raises(PermissionError):
        await session.read_file("pipe")


async def test_session_runs_calls_in_order(session: Session) -> None:
    await session.run_python("seen = []")
    await asyncio.gather(*(session.run_python(f"seen.append({n})") for n in range(5)))
    assert (await session.run_python("seen")).stdout == "[0, 1, 2, 3, 4]\n"


@on_every_backend
@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_session_restarts_its_box_after_a_cancelled_call(session: Session) -> None:
    await session.run_python("x = 1")
    call = asyncio.create_task(session.run_python("import time; time.sleep(60)", timeout_s=60.0))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "NameError" in (await session.run_python("x")).stderr


@on_every_backend
async def test_session_is_lost_once_closed(session: Session) -> None:
    await session.close()
    await session.close()
    with pytest.raises(SandboxLost):
        await session.run_python("1")


WALLED = [pytest.param("bwrap", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]
"""Backends whose boxes are of this machine and apart from each other."""


@on_every_backend
@pytest.mark.parametrize("backend", WALLED)
async def test_boxes_do_not_see_each_other(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        one, other = await asyncio.gather(sandbox.start("one"), sandbox.start("other"))
        await one.write_file("secret", b"x")
        await one.run(["sh", "-c", "sleep 50 &"])
        look = "print(os.path.exists('/tmp/secret'), sum(p.isdigit() for p in os.listdir('/proc')))"
        secret, processes = (await other.run_python(f"import os\n{look}")).stdout.split()
        assert (secret, processes) == ("False", "2")  # the driver and the interpreter


@pytest.mark.bwrap
async def test_sandbox_waits_for_a_free_box_within_a_deadline() -> None:
    sandbox = make_sandbox(CONFIG.model_copy(update={"max_boxes": 1}), "tests")
    sandbox.queue_timeout_s = 0.2  # type: ignore[attr-defined]
    first = await sandbox.start("first")
    with pytest.raises(SandboxError, match=r"sandbox\.max_boxes"):
        await sandbox.start("second")
    sandbox.queue_timeout_s = 60  # type: ignore[attr-defined]
    waiting = asyncio.create_task(sandbox.start("third"))
    await asyncio.sleep(0)
    await first.close()
    assert (await (await waiting).run_python("3")).stdout == "3\n"
    with pytest.raises(SandboxLost):
        await sandbox.attach(first.session_id)
    await sandbox.close()


# ---- the shell


async def told(session: Session, command: str, timeout_s: float = 30.0) -> tuple[str, str, int | None, bool]:
    result = await session.run_shell(command, timeout_s=timeout_s)
    return result.stdout, result.stderr, result.exit_code, result.state_lost


@on_every_backend
async def test_shell_keeps_directory_variables_and_functions(session: Session) -> None:
    first = await told(
        session, "mkdir -p 'a b' && cd 'a b' && X='1 2'; f() { echo f$1; }; declare -A m=([k]=v)\nset -f"
    )
    assert first == ("", "", 0, False)
    assert await told(session, 'echo "${PWD##*/} $X ${m[k]}" *; f 4') == ("a b 1 2 v *\nf4\n", "", 0, False)


async def test_shell_output_exit_codes_and_last_status(session: Session) -> None:
    assert await told(session, "echo out; echo err >&2; (exit 3)") == ("out\n", "err\n", 3, False)
    assert await told(session, "echo $?") == ("3\n", "", 0, False)
    stdout, stderr, exit_code, _ = await told(session, "no-such-program")
    assert (stdout, exit_code) == ("", 127)
    assert "no-such-program: command not found" in stderr
    assert "it's" in (await told(session, 'echo "it\'s"'))[0]


@pytest.mark.parametrize(
    "code", ["if then", "echo 'open", "cat <<END", "break; continue", "for x in 1 2; do echo", "\\"]
)
async def test_shell_ends_open_syntax_with_its_call(session: Session, code: str) -> None:
    await told(session, "X=1")
    await told(session, code)
    assert await told(session, "echo $X") == ("1\n", "", 0, False)


async def test_shell_commands_see_no_pipe_of_the_driver(session: Session) -> None:
    assert await told(session, "cat; read x; echo $?") == ("1\n", "", 0, False)
    listed = (await told(session, "ls -l /proc/self/fd"))[0]
    assert listed.count("pipe:") == 2
    assert "9 ->" not in listed


async def test_shell_exit_loses_its_state(session: Session) -> None:
    await told(session, "X=1; cd /")
    assert await told(session, "echo bye; exit 7") == ("bye\n", "", 7, True)
    assert await told(session, 'echo "[$X]"') == ("[]\n", "", 0, False)


@on_every_backend
async def test_shell_timeout_keeps_files_and_interpreter(session: Session) -> None:
    await session.run_python("x = 5")
    await told(session, "X=1; echo kept > file; sleep 61 &")
    result = await session.run_shell("echo before; sleep 62", timeout_s=5.0)
    assert (result.stdout, result.exit_code, result.limit) == ("before\n", None, "wall")
    assert (result.state_lost, result.files_lost) == (True, False)
    assert await told(session, 'cat file; echo "[$X]"') == ("kept\n[]\n", "", 0, False)
    after = await session.run_python("x")
    assert (after.stdout, after.stderr, after.limit, after.state_lost) == ("5\n", "", None, False)


@pytest.mark.bwrap
async def test_shell_timeout_ends_all_that_it_started(sandbox: Sandbox) -> None:
    session = await sandbox.start("daemons")
    await session.run_shell("(setsid sleep 61 &) ; sleep 62 & disown; true")
    until_seen = "until cat /proc/[0-9]*/comm | grep -q sleep; do :; done"  # they become it after the call
    assert (await session.run(["sh", "-c", until_seen])).exit_code == 0
    assert (await session.run_shell("sleep 63", timeout_s=0.3)).limit == "wall"
    assert "sleep" not in (await session.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout


async def test_shell_survives_the_end_of_the_interpreter(session: Session) -> None:
    await told(session, "X=1")
    assert (await session.run_python("import time; time.sleep(60)", timeout_s=0.3)).state_lost
    assert await told(session, "echo $X") == ("1\n", "", 0, False)


@on_every_backend
@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_session_reports_a_lost_box_once_to_each_kind(session: Session) -> None:
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


async def test_shell_outcome_cannot_be_forged_by_an_earlier_call(session: Session) -> None:
    forger = "(while sleep 0.01; do printf '%010d%010d' 7 0 > /proc/$$/fd/9; done) 2>/dev/null >&2 & true"
    await session.run_shell(forger)
    assert await told(session, "sleep 0.3; (exit 5)") == ("", "", 5, False)


async def test_shell_refuses_a_nul_as_an_observation(session: Session) -> None:
    assert await told(session, "echo a\0b") == ("", "the command holds a NUL character\n", 1, False)
    assert await told(session, "echo a") == ("a\n", "", 0, False)


def test_shell_requests_work_in_a_posix_shell(tmp_path: Path) -> None:
    calls = [shell.request(7, "cd /; x=1; (exit 3)", 0), shell.request(8, """echo $? $x $PWD; cat; echo "it's" """, 3)]
    feed = shell.PRELUDE + b"".join(calls) + shell.request(9, "if", 0)
    done = subprocess.run(
        ["sh", "-c", "exec sh 9>outcomes"], input=feed, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.stdout == b"3 1 /\nit's\n"
    assert (tmp_path / "outcomes").read_text() == "".join(
        f"{n:010d}{code:010d}" for n, code in ((7, 3), (8, 0), (9, 2))
    )


# ---- streams


async def test_stream_yields_output_while_the_run_lasts(session: Session) -> None:
    stream = session.stream(["sh", "-c", "echo one; read line; sleep 60"], stdin="x" * 200_000, timeout_s=5.0)
    assert await anext(stream) == Output("stdout", "one\n")  # of a run that does not end by itself
    last = [piece async for piece in stream]
    assert [(piece.data, piece.result.limit) for piece in last if piece.result] == [("", "wall")]
    assert last[-1].result is not None


@on_every_backend
async def test_stream_yields_whole_characters_and_a_result(session: Session) -> None:
    script = r"printf 'h\303'; sleep 0.2; printf '\251 \377'; echo err >&2; exit 3"
    pieces = [piece async for piece in session.stream(["sh", "-c", script], stdin="", cwd="/usr", timeout_s=30.0)]
    assert "".join(piece.data for piece in pieces if piece.stream == "stdout") == "hé \ufffd"
    assert "".join(piece.data for piece in pieces if piece.stream == "stderr") == "err\n"
    results = [piece.result for piece in pieces if piece.result is not None]
    assert [pieces[-1].result] == results
    assert results[0] is not None
    assert (results[0].stdout, results[0].stderr, results[0].exit_code) == ("hé \ufffd", "err\n", 3)


async def test_stream_is_bounded_and_reports_the_limit(session: Session) -> None:
    seen = 0
    result: RunResult | None = None
    async for piece in session.stream(["sh", "-c", "yes; sleep 60"], timeout_s=30.0):
        seen, result = seen + len(piece.data), piece.result
    assert result is not None
    assert (result.exit_code, result.limit) == (None, "output")
    assert seen == CONFIG.output_bytes
    stopped = [piece async for piece in session.stream(["sleep", "60"], timeout_s=0.2)]
    assert [piece.result.limit for piece in stopped if piece.result] == ["wall"]
    assert (await session.run_python("1")).stdout == "1\n"
