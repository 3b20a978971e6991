"""One role's process over its restarts; real processes."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.living import alive
from tests.until import until

from penstock.deploy import RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.run.processes import RestartBudget

CRASHES = """
import pathlib
file = pathlib.Path("crashes")
crashes = int(file.read_text()) if file.exists() else 0
file.write_text(str(crashes + 1))
raise SystemExit(crashes < 3)
"""
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.pid, "up")
time.sleep(600)
"""
REFUSES = """
import os, pathlib
pathlib.Path(os.environ["PENSTOCK_STOP_FILE"]).write_text("DataError: row 7 has no prompt")
raise SystemExit(1)
"""


@pytest.fixture
def role(tmp_path: Path) -> Callable[..., RoleProcess]:
    def make(code: str, max_restarts: int = 3, **options: object) -> RoleProcess:
        argv, log = [sys.executable, "-u", "-c", code], tmp_path / "worker.log"
        return RoleProcess(RoleSpec("worker", argv, dict(os.environ), log, max_restarts, 0.2, tmp_path), **options)

    return make


async def printed(process: RoleProcess, text: str) -> int:
    await until(lambda: process.pid is not None and text in process.spec.log.read_text())
    assert process.pid is not None
    return process.pid


async def test_a_killed_role_comes_back_and_one_that_finishes_does_not(role: Callable[..., RoleProcess]) -> None:
    code = "import pathlib, time; print('up')\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)"
    process = role(code)
    running = asyncio.create_task(process.run())
    first = await printed(process, "up\n")
    os.kill(first, signal.SIGKILL)
    assert await printed(process, "up\nup\n") != first
    (process.spec.log.parent / "done").touch()
    await running
    assert (process.restarts, process.pid, process.spec.log.read_text()) == (1, None, "up\nup\n")


@pytest.mark.parametrize(
    ("code", "message", "restarts"),
    [
        ("raise SystemExit('the disk is full')", r"1 restarts used up[\s\S]*the disk is full", 2),
        (REFUSES, "worker stopped the run: DataError: row 7 has no prompt", 0),
    ],
    ids=["keeps failing", "says why it stops"],
)
async def test_a_role_that_cannot_go_on_names_the_cause(
    role: Callable[..., RoleProcess], code: str, message: str, restarts: int
) -> None:
    process = role(code, max_restarts=1)
    with pytest.raises(RoleFailed, match=message):
        await process.run()
    assert process.restarts == restarts


async def test_a_role_knows_the_process_that_started_it(role: Callable[..., RoleProcess]) -> None:
    process = role("import os; print(os.environ['PENSTOCK_PARENT'])")
    await process.run()
    assert process.spec.log.read_text() == f"{os.getpid()}\n"


async def test_stop_ends_the_role_and_what_it_started(role: Callable[..., RoleProcess]) -> None:
    process = role(STUBBORN)
    running = asyncio.create_task(process.run())
    await printed(process, "up")
    child = int(process.spec.log.read_text().split()[0])
    async with asyncio.timeout(60):
        await process.stop()
        await running
    await until(lambda: not alive(child))


async def test_stop_in_the_moment_of_the_start_ends_the_role(role: Callable[..., RoleProcess]) -> None:
    process = role(STUBBORN)
    running = asyncio.create_task(process.run())
    await asyncio.sleep(0)  # the process is there, and has no handlers yet
    assert process.pid is not None
    async with asyncio.timeout(60):
        await process.stop()
        await running
    assert process.state == "stopped"


BUSY = """
import os, pathlib, subprocess, sys, time
work = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", work])
exec(work)
print(os.environ["PENSTOCK_LIFE"], "up")
while pathlib.Path("crash").exists(): time.sleep(0.01)
"""


async def test_all_that_a_process_used_is_known_at_its_end(role: Callable[..., RoleProcess]) -> None:
    """Its own CPU time, that of a child it has waited for, and with GPUs their time."""
    process = role(BUSY)
    crash = process.spec.log.parent / "crash"
    crash.touch()
    running = asyncio.create_task(process.run())
    os.kill(await printed(process, "up\n"), signal.SIGKILL)
    await until(lambda: process.spec.log.read_text().count("up") == 2)
    crash.unlink()
    await running
    killed, finished = process.take_ended()
    assert [killed.life, finished.life] == process.spec.log.read_text().split()[::2]
    assert (killed.was_killed, finished.was_killed) == (True, False)
    assert min(killed.device_s, finished.device_s) >= 0.6  # CPU time: load does not change it
    assert process.take_ended() == []
    on_gpus = role("import time; time.sleep(0.5)")
    on_gpus.spec = replace(on_gpus.spec, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    await on_gpus.run()
    assert on_gpus.take_ended()[0].device_s >= 2.0  # load only makes it longer


async def test_only_restarts_within_a_window_use_the_budget_up(role: Callable[..., RoleProcess]) -> None:
    hours = itertools.count(0.0, 3600.0)
    process = role(CRASHES, max_restarts=1, clock=lambda: next(hours))
    await process.run()
    assert process.restarts == 3
    (process.spec.log.parent / "crashes").unlink()
    with pytest.raises(RoleFailed):
        await role(CRASHES, max_restarts=1, clock=lambda: 0.0).run()


def test_a_budget_forgets_what_is_older_than_its_window() -> None:
    now = 0.0
    budget, spent = RestartBudget(2, 100.0, clock=lambda: now), []
    for now in (0.0, 50.0, 99.0, 150.0, 160.0, 300.0):  # noqa: B007 - read by the clock
        spent.append(budget.spend())
    assert spent == [True, True, False, True, False, True]


async def test_a_role_that_fails_while_it_stops_says_so(role: Callable[..., RoleProcess]) -> None:
    process = role(f"import signal\ndef end(*_):\n    {'; '.join(REFUSES.strip().splitlines())}\n"
                   "signal.signal(signal.SIGTERM, end)\nprint('up')\nwhile True: signal.pause()")  # fmt: skip
    process.spec = replace(process.spec, stop_grace_s=20)
    running = asyncio.create_task(process.run())
    await printed(process, "up\n")
    await process.stop()
    with pytest.raises(RoleFailed, match="row 7 has no prompt"):
        await running


async def test_the_cause_of_the_last_failure_is_in_the_first_line(role: Callable[..., RoleProcess]) -> None:
    with pytest.raises(RoleFailed) as failed:
        await role("raise ValueError('the model has no head')", max_restarts=0).run()
    assert "ValueError: the model has no head" in failed.value.why
