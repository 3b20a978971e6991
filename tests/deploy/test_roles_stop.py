"""A role that is told to stop more than once, as under a scheduler, still ends in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROLE = """
import asyncio, sys
from penstock.deploy import run_role

async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        print("saving", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(0)
        print("saved", flush=True)
        raise

run_role(main)
"""


@pytest.mark.parametrize("more", [0, 2])
def test_a_second_term_does_not_cut_off_the_first(more: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    role = subprocess.Popen(
        [sys.executable, "-c", ROLE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert role.stdin is not None
    assert role.stdout is not None
    assert role.stdout.readline() == "up\n"
    role.send_signal(signal.SIGTERM)
    assert role.stdout.readline() == "saving\n"
    for _ in range(more):
        role.send_signal(signal.SIGTERM)
    rest, _ = role.communicate("go on\n", timeout=60)
    assert rest == "saved\n"
    assert role.returncode == 0
