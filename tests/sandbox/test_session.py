"""What a session promises to its caller, on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.sandbox.backends import BACKENDS, CONFIG, OWN_BOXES, sandbox_of

from penstock.sandbox import SandboxError, SandboxLost, Session, make_sandbox


@pytest_asyncio.fixture(params=BACKENDS)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    async with sandbox_of(request.param) as sandbox:
        session = await sandbox.start("a test")
        yield session
        await session.close()


async def test_names_live_on_between_calls(session: Session) -> None:
    first = await session.run_python("import math\nx = 20\ndef double(n):\n    return 2 * n")
    second = await session.run_python("print('sum', x + 1)\ndouble(x) + math.floor(2.5)")
    assert (first.stdout, first.stderr, first.exit_code) == ("", "", 0)
    assert (second.stdout, second.exit_code, second.limit, second.state_lost) == ("sum 21\n42\n", 0, None, False)


async def test_an_exception_shows_the_codes_own_lines_and_keeps_the_state(session: Session) -> None:
    await session.run_python("x = 1\ndef fail():\n    raise KeyError('k')")
    result = await session.run_python("fail()")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert "raise KeyError('k')" in result.stderr
    assert result.stderr.splitlines()[-1] == "KeyError: 'k'"
    assert "penstock" not in result.stderr
    assert (await session.run_python("x")).stdout == "1\n"


async def test_syntax_errors_exits_and_input(session: Session) -> None:
    assert "SyntaxError" in (await session.run_python("1 +")).stderr
    assert (await session.run_python("exit(3)")).exit_code == 3
    assert "EOFError" in (await session.run_python("input()")).stderr


async def test_a_timeout_stops_the_code_and_loses_the_state(session: Session) -> None:
    await session.run_python("x = 1")
    result = await session.run_python("print('before')\nwhile True: pass", timeout_s=0.3)
    assert (result.stdout, result.exit_code, result.limit, result.state_lost) == ("before\n", None, "wall", True)
    assert 0.3 <= result.duration_s < 20.0
    after = await session.run_python("x")
    assert "NameError" in after.stderr
    assert not after.state_lost


@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_a_limit_of_years_is_a_limit(session: Session) -> None:
    assert (await session.run(["true"], timeout_s=1e12)).exit_code == 0


async def test_ending_the_interpreter_is_the_codes_own_affair(session: Session) -> None:
    result = await session.run_python("import os\nos._exit(7)")
    assert (result.exit_code, result.state_lost) == (7, True)
    assert (await session.run_python("1 + 1")).stdout == "2\n"


async def test_long_output_is_cut_and_leaves_room_for_the_traceback(session: Session) -> None:
    result = await session.run_python("print('x' * 100_000)\n1 / 0")
    assert result.limit == "output"
    assert len(result.stdout) + len(result.stderr) <= CONFIG.output_bytes
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_binary_output_becomes_text(session: Session) -> None:
    result = await session.run_python(r"import os; os.write(1, b'\xff\x00\x1b[31m\xe2\x82'); None")
    assert result.stdout == "�\x00\x1b[31m�"


async def test_commands_get_stdin_and_give_their_exit_code(session: Session) -> None:
    result = await session.run(["sh", "-c", "cat; echo oops >&2; exit 4"], stdin="hälló" * 50_000)
    assert (result.exit_code, result.stderr) == (4, "oops\n")
    assert result.stdout.startswith("hällóhälló")
    assert (await session.run(["no-such-program"])).exit_code == 127


async def test_a_command_that_is_stopped_leaves_the_interpreter_alone(session: Session) -> None:
    await session.run_python("x = 5")
    result = await session.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.2)
    assert (result.exit_code, result.limit, result.state_lost) == (None, "wall", False)
    assert (await session.run_python("x")).stdout == "5\n"


async def test_a_background_process_does_not_hold_its_run(session: Session) -> None:
    result = await session.run(["sh", "-c", "sleep 60 & echo started"], timeout_s=3.0)
    assert (result.stdout, result.limit) == ("started\n", None)
    assert result.duration_s < 10.0


async def test_files_go_in_and_come_out(session: Session) -> None:
    data = bytes(range(256)) * 4000
    await session.write_file("folder.bin", data)
    assert await session.read_file("folder.bin") == data
    assert await session.read_file("folder.bin", max_bytes=3) == b"\x00\x01\x02"
    assert (await session.run_python("len(open('folder.bin', 'rb').read())")).stdout == f"{len(data)}\n"
    with pytest.raises(FileNotFoundError):
        await session.read_file("nothing-here")
    with pytest.raises(OSError, match="too long"):
        await session.write_file("n" * 5000, b"")


async def test_a_fifo_does_not_block_the_file_route(session: Session) -> None:
    await session.run_python("import os; os.mkfifo('pipe')")
    with pytest.raises(OSError, match=r"regular|No such device"):
        await session.write_file("pipe", b"x")
    with pytest.raises(PermissionError):
        await session.read_file("pipe")


async def test_calls_of_one_session_queue_up(session: Session) -> None:
    await session.run_python("seen = []")
    await asyncio.gather(*(session.run_python(f"seen.append({n})") for n in range(5)))
    assert (await session.run_python("seen")).stdout == "[0, 1, 2, 3, 4]\n"


@pytest.mark.parametrize("session", OWN_BOXES, indirect=True)
async def test_a_cancelled_call_ends_its_box_and_the_next_one_gets_a_fresh_one(session: Session) -> None:
    await session.run_python("x = 1")
    call = asyncio.create_task(session.run_python("while True: pass", timeout_s=60.0))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert "NameError" in (await session.run_python("x")).stderr


async def test_a_closed_session_is_lost(session: Session) -> None:
    await session.close()
    await session.close()
    with pytest.raises(SandboxLost):
        await session.run_python("1")


@pytest.mark.bwrap
async def test_sessions_wait_for_a_free_box_and_give_up_in_time() -> None:
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
