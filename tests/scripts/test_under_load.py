"""scripts/test-under-load: its load ends with it, and the command's status is passed on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
from tests.until import until_in_threads

SCRIPT = Path(__file__).parents[2] / "scripts/test-under-load"


def test_the_status_of_the_command_is_passed_on() -> None:
    assert subprocess.run([SCRIPT, "sh", "-c", "exit 3"], check=False, timeout=100).returncode == 3


def test_the_load_ends_with_a_script_that_is_killed() -> None:
    with subprocess.Popen([SCRIPT, "sleep", "100"]) as script:
        family = psutil.Process(script.pid)
        until_in_threads(lambda: len(family.children()) == 4)
        started = family.children()
        script.kill()
    (command,) = [one for one in started if one.name() == "sleep"]
    started.remove(command)
    until_in_threads(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started))
    command.kill()
