"""Code that wants to outlive its call, its session or its box."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.sandbox.attacks.targets import CONFIG, Target, attack, ended_by
from tests.sandbox.backends import on_every_backend
from tests.sandbox.orphans import MARK, marked_processes

from penstock.sandbox import SandboxError, SandboxLost, Session

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLEEPS = f"os.execv('/bin/sleep', ['{MARK}', '1000'])"
"""It forks nothing: a child of a shell carries the mark as well, until it has become another program."""
STOPS = f"os.execv('/bin/sh', ['sh', '-c', 'kill -STOP $$; exec sleep 1000', '{MARK}'])"
DAEMON = f"""
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except Exception: pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        {SLEEPS}
    os._exit(0)
"""
STOPPED = DAEMON.replace(SLEEPS, STOPS)
GHOST = f"""
import ctypes, os, sys, threading, time
if os.fork() == 0:
    os.setsid()
    os.execv('/usr/bin/env', ['env', 'python3', '-c', '''
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall(60, 0)
''', '{MARK}'])
"""
"""Its first thread ends and others go on: in every list it looks like a zombie."""
LINGERERS = {"daemon": DAEMON, "stopped": STOPPED, "ghost": GHOST}


async def assert_none_lingers() -> None:
    """Zombies do not count: a slow pid 1 reaps them later."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while marked_processes():
                await asyncio.sleep(0.05)
    assert not marked_processes()


@on_every_backend
async def test_attack_daemon_goes_with_its_box(target: Target) -> None:
    session = await target.sandbox.start("daemons")
    for kind, code in LINGERERS.items():
        seen = marked_processes()
        outcome = await attack(session, code)
        assert outcome.exit_code == 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):  # the call does not wait until it has become another program
                while len(marked_processes()) <= len(seen):
                    await asyncio.sleep(0.02)
        assert len(marked_processes()) > len(seen), (kind, seen, marked_processes(), outcome)
    await session.close()
    await assert_none_lingers()
    await target.visit_neighbour()


@pytest.mark.parametrize("kind", LINGERERS)
async def test_attack_daemon_goes_with_the_limit_that_its_call_broke(session: Session, kind: str) -> None:
    code = _endless(LINGERERS[kind])
    assert ended_by(await attack(session, code, timeout_s=2.5), "wall")
    await assert_none_lingers()
    result = await session.run(["python3", "-c", code], timeout_s=2.5)
    assert (result.exit_code, result.limit) == (None, "wall")
    await assert_none_lingers()


async def test_attack_closing_in_the_middle_of_it(target: Target) -> None:
    """Several at once: each end is the box's own."""
    codes = [*LINGERERS.values(), "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"]
    sessions = [await target.sandbox.start("closed early") for _ in codes]
    running = [
        asyncio.create_task(attack(*pair, timeout_s=30.0)) for pair in zip(sessions, map(_endless, codes), strict=True)
    ]
    await asyncio.sleep(0.6)
    await asyncio.gather(*(session.close() for session in sessions))
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(outcome, SandboxError)  # it was we who ended it
    with pytest.raises(SandboxLost):
        await sessions[0].run_python("1")
    await assert_none_lingers()
    await target.visit_neighbour()


def _endless(code: str) -> str:
    """Asleep: one that spins comes to its limit of processor time if whoever should close it is late."""
    return code + "\nimport time\nwhile True: time.sleep(1)"


async def test_attack_caller_who_gives_up_in_the_middle_of_it(target: Target) -> None:
    """The slot of the box is free again, whatever it was doing: more such callers than there are boxes."""
    for _ in range(2):
        sessions = [await target.sandbox.start("given up") for _ in range(CONFIG.max_boxes - 1)]
        running = [asyncio.create_task(attack(session, _endless(DAEMON), timeout_s=30.0)) for session in sessions]
        await asyncio.sleep(0.5)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in sessions))
    await assert_none_lingers()
    await target.visit_neighbour()


async def test_attack_closing_twice_and_after_the_end(target: Target) -> None:
    session = await target.sandbox.start("twice")
    await attack(session, "import os\nos._exit(0)")
    await asyncio.gather(session.close(), session.close())
    await session.close()
    await target.visit_neighbour()
