import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.deploy import RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.run.processes import RestartBudget


def role(tmp_path: Path, code: str, *, max_restarts: int = 3, stop_grace_s: float = 5.0) -> RoleProcess:
    argv = [sys.executable, "-u", "-c", code]
    return RoleProcess(RoleSpec("worker", argv, dict(os.environ), tmp_path / "worker.log", max_restarts, stop_grace_s))


async def started(process: RoleProcess, text: str) -> int:
    async with asyncio.timeout(60):
        while process.pid is None or text not in process.spec.log.read_text():
            await asyncio.sleep(0.01)
    return process.pid


async def test_a_role_that_finishes_is_not_started_again(tmp_path: Path) -> None:
    process = role(tmp_path, "print('done')")
    await process.run()
    assert process.restarts == 0
    assert process.spec.log.read_text() == "done\n"


async def test_a_killed_role_comes_back(tmp_path: Path) -> None:
    code = "import pathlib,sys,time; p=pathlib.Path(sys.argv[0] or '.'); print('up'); time.sleep(600)"
    process = role(tmp_path, code)
    task = asyncio.create_task(process.run())
    first = await started(process, "up\n")
    os.kill(first, signal.SIGKILL)
    second = await started(process, "up\nup\n")
    assert second != first
    assert process.restarts == 1
    await process.stop()
    await task


async def test_process_that_keeps_failing_reports_its_log(tmp_path: Path) -> None:
    process = role(tmp_path, "raise SystemExit('the disk is full')", max_restarts=1)
    with pytest.raises(RoleFailed, match=r"1 restarts used up[\s\S]*the disk is full"):
        await process.run()


async def test_stop_ends_the_role_and_what_it_started(tmp_path: Path) -> None:
    code = (
        "import signal,subprocess,sys,time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(child.pid, 'up')\n"
        "time.sleep(600)\n"
    )
    process = role(tmp_path, code, stop_grace_s=0.2)
    task = asyncio.create_task(process.run())
    await started(process, "up")
    child = int(process.spec.log.read_text().split()[0])
    await process.stop()
    await task
    assert await gone(child)


async def gone(pid: int) -> bool:
    """Ended, or a zombie that init has not reaped yet."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_role_that_says_why_it_stops_is_not_started_again(tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "pathlib.Path(os.environ['PENSTOCK_STOP_FILE']).write_text('DataError: row 7 has no prompt')\n"
        "raise SystemExit(1)\n"
    )
    process = role(tmp_path, code)
    with pytest.raises(RoleFailed, match="worker stopped the run: DataError: row 7 has no prompt"):
        await process.run()
    assert process.restarts == 0


async def test_restarts_are_counted_per_window(tmp_path: Path) -> None:
    """Crashes far apart do not add up; as many within one window do."""
    code = "import pathlib; p = pathlib.Path('crashes'); n = int(p.read_text()) if p.exists() else 0\n"
    code += "p.write_text(str(n + 1)); raise SystemExit(n < 3)"
    hours = itertools.count(0.0, 3600.0)
    argv, log = [sys.executable, "-c", code], tmp_path / "worker.log"
    spec = RoleSpec("worker", argv, dict(os.environ), log, 1, cwd=tmp_path)
    process = RoleProcess(spec, clock=lambda: next(hours))
    await process.run()
    assert process.restarts == 3
    (tmp_path / "crashes").unlink()
    with pytest.raises(RoleFailed):
        await RoleProcess(spec, clock=lambda: 0.0).run()


def test_a_budget_forgets_what_is_older_than_its_window() -> None:
    now = 0.0
    budget = RestartBudget(2, 100.0, clock=lambda: now)
    found = []
    for at in (0.0, 50.0, 99.0, 150.0, 160.0, 300.0):
        now = at
        found.append(budget.spend())
    assert found == [True, True, False, True, False, True]
