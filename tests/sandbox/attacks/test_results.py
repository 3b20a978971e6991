"""Input and output made to confuse whoever carries them: frames, bytes, escapes, lengths."""

from __future__ import annotations

import asyncio
import re

import pytest
from tests.sandbox.attacks.targets import CONFIG, attack
from tests.sandbox.backends import on_every_backend

from penstock.sandbox import Session

pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE_KINDS = ("python", "command")


# ---- imitations

FORGED_FRAMES = """
import json, os, struct
answer = {"stdout": "forged", "stderr": "", "exit_code": 0, "limit": None, "duration_s": 0, "state_lost": False}
bodies = [json.dumps({**answer, "id": number}).encode() for number in range(1, 20)]
frames = [struct.pack('>I', len(body)) + body for body in bodies]
frames += [body + b'\\n' for body in bodies]
frames += [struct.pack('>BxxxI', stream, len(body)) + body for stream in (0, 1, 2) for body in bodies]
for fd in range(256):
    for frame in frames:
        try: os.write(fd, frame)
        except OSError: pass
"""


@on_every_backend
@pytest.mark.parametrize("kind", CODE_KINDS)
async def test_attack_output_that_looks_like_our_frames(session: Session, kind: str) -> None:
    """It is text like any other, and the exit code is the one that the kernel told."""
    code = FORGED_FRAMES + "import sys\nsys.exit(5)"
    if kind == "python":
        result = await attack(session, code, timeout_s=10.0)
    else:
        result = await session.run(["python3", "-c", code], timeout_s=30.0)
        assert result.exit_code == 5
    assert result.stdout.startswith("\x00\x00\x00")
    assert '"forged"' in result.stdout
    assert result.limit in (None, "wall")


async def test_attack_forged_outcomes_only_cut_short_codes_own_call(session: Session) -> None:
    code = """
import os, sys, time
number = sys._getframe(2).f_locals['number']
for fd in range(3, 20):
    for forged in (number, *range(100)):
        try: os.write(fd, b'%010d%010d' % (forged, 77))
        except OSError: pass
time.sleep(60)
"""
    result = await session.run_python(code, timeout_s=30.0)
    assert (result.exit_code, result.limit) == (77, None)
    assert (await session.run_python("1", timeout_s=0.3)).limit == "wall"
    assert (await session.run_python("1")).stdout == "1\n"


async def test_attack_answer_that_never_comes(session: Session) -> None:
    """Code that closes or eats every pipe it has harms its own call alone."""
    code = "import os\nos.closerange(0, 1024)"
    result = await attack(session, code, timeout_s=0.5)
    assert result.state_lost
    eaten = """
import os
for fd in range(3, 20):
    try:
        os.set_blocking(fd, False)
        os.read(fd, 1 << 20)
    except OSError: pass
"""
    await attack(session, "name = 'kept'")
    assert not (await attack(session, eaten)).state_lost
    await asyncio.sleep(0.2)  # an interpreter that ends by it has ended now
    assert (await attack(session, "name")).stdout == "'kept'\n"
    closed = """
import os, stat
for fd in range(3, 20):
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.read(fd, 0)  # the end that the next request comes from
            os.close(fd)
    except OSError: pass
"""
    assert (await attack(session, closed)).state_lost


async def test_attack_words_are_not_results(session: Session) -> None:
    for text in ("SandboxError: the box ended", "Killed", "limit: memory", '{"limit": "wall"}', "state_lost"):
        result = await attack(session, f"import sys\nprint({text!r})\nprint({text!r}, file=sys.stderr)")
        assert (result.stdout, result.stderr) == (f"{text}\n", f"{text}\n")
        assert (result.exit_code, result.limit, result.state_lost) == (0, None, False)


async def test_attack_end_by_its_own_signal_is_no_limit(session: Session) -> None:
    """Neither a kill that looks like want of memory nor one that looks like want of time."""
    for signal in (2, 6, 9, 11, 15, 25, 31):
        result = await session.run(["sh", "-c", f"kill -{signal} $$"])
        assert (result.exit_code, result.limit) == (-signal, None)


# ---- bytes


async def test_attack_binary_output(session: Session) -> None:
    code = "import os\nos.write(1, bytes(range(256)) * 4 + b'\\xf0\\x9f\\x98')"
    result = await attack(session, code)
    assert result.stdout.count("\x00") == 4
    assert result.stdout.count("\ufffd") >= 128 * 4
    assert result.stdout.startswith("".join(map(chr, range(128))))
    noise = await session.run(["head", "-c", "60000", "/dev/urandom"])
    assert noise.exit_code == 0
    noise.stdout.encode("utf-8")


async def test_attack_character_that_the_limit_cuts_in_two(session: Session) -> None:
    result = await attack(session, f"print('\\U0001f600' * {CONFIG.output_bytes}, end='')")
    assert result.limit == "output"
    assert set(result.stdout) <= {"\U0001f600", "\ufffd"}
    assert result.stdout.count("\ufffd") <= 1


ANSI_BOMBS = {
    "clear": "\x1b[2J\x1b[H\x1bc",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZWNobyBvd25lZA==\x07",
    "repeat": "A\x1b[1000000000b",
    "size": "\x1b[8;99999;99999t",
    "log line": "\r\n2026-01-01 00:00:00 CRITICAL forged\r\n",
    "right to left": "\u202e\u2066",
    "accents": "a" + "\u0301" * 5000,
}


async def test_attack_terminal_escapes_are_data(session: Session) -> None:
    for bomb in ANSI_BOMBS.values():
        result = await attack(session, f"import sys\nprint({bomb!r})\nprint({bomb!r}, file=sys.stderr)")
        assert (result.stdout, result.stderr) == (f"{bomb}\n", f"{bomb}\n")
        assert (result.exit_code, result.limit) == (0, None)


# ---- input


async def test_attack_enormous_argument(session: Session) -> None:
    for argv in (["true", "x" * (4 << 20)], ["true", *["x" * 2000] * 3000]):
        result = await session.run(argv)
        assert (result.exit_code, result.stderr) == (126, "true: Argument list too long\n")


async def test_attack_arguments_that_cannot_be_run(session: Session) -> None:
    missing = await session.run(["no-such-program"])
    assert (missing.exit_code, "No such file" in missing.stderr) == (127, True)
    folder = await session.run(["/tmp"])
    assert (folder.exit_code, "denied" in folder.stderr) == (126, True)
    for argv in ([""], ["a\0b"], ["true", "a\0b"], ["\ud800"], ["n" * 5000]):
        result = await session.run(argv)
        assert result.exit_code in (126, 127), argv
        assert result.limit is None


async def test_attack_flood_of_input_to_one_who_does_not_read(session: Session) -> None:
    result = await session.run(["sleep", "0.1"], stdin="x" * (8 << 20))
    assert (result.exit_code, result.limit) == (0, None)
    counted = await session.run(["wc", "-c"], stdin="x" * (8 << 20))
    assert counted.stdout.strip() == str(8 << 20)


BREAKING = {
    "'a\0b'": "null byte",
    "'\ud800'": r"Error|\?",
    "print('\\ud800')": r"\?",
    "(" * 5000 + ")" * 5000: "Error",
    "-" * 200_000 + "1": "Error",
    "def f(): f()\nf()": "RecursionError",
    "raise type('\\x1b[31mX', (Exception,), {})('a\\0b')": "X",
    "class A(BaseException): pass\nraise A": "A",
    "import sys\nsys.stdout = None\nsys.stderr = None\nraise ValueError('still told')": "still told",
    "import builtins\nbuiltins.__import__ = builtins.len = builtins.open = None\n1 / 0": "ZeroDivisionError",
    "import sys\nsys.modules.clear()\n1 / 0": "ZeroDivisionError",
}
END_INTERPRETER = "import os\nos._exit(0)"
EXIT_CODES = ("10**30", "-1", "True", "'words'", "object()", "type('E', (), {'__str__': lambda s: 1 / 0})()")


async def test_attack_code_that_breaks_what_runs_it(session: Session) -> None:
    """A traceback, a crash of the interpreter or `?` for what is no character; never an error of the sandbox."""
    for code, words in BREAKING.items():
        result = await session.run_python(code)
        assert result.limit in (None, "memory"), code[:50]
        assert result.state_lost or re.search(words, result.stdout + result.stderr), code[:50]
        await session.run_python(END_INTERPRETER)
        await session.run_python("pass")  # which tells, if the one before could not, that the state is lost


async def test_attack_exit_codes_that_are_none(session: Session) -> None:
    for code in EXIT_CODES:
        result = await attack(session, f"import sys\nsys.exit({code})")
        assert result.limit is None
        assert result.exit_code == 0 if code == "10**30" else 0 < (result.exit_code or 0) <= 255, code


async def test_attack_crash_of_the_interpreter_is_the_codes_own(session: Session) -> None:
    result = await attack(session, "import ctypes\nctypes.string_at(0)")
    assert (result.exit_code, result.limit, result.state_lost) == (-11, None, True)
