"""What a box's first process ends, and what it spares."""

from __future__ import annotations

import subprocess
import sys

SLOW_TO_END = """
import os, signal, threading, time
from penstock.sandbox.inside import children

table = children.ChildTable({"boxed": False, "reaper": True, "cpu_s": 600})
nothing, kill = os.open(os.devnull, os.O_RDONLY), os.kill

def wait_to_be_killed():
    time.sleep(600)
    return 0

spared, stranger = table.spawn(wait_to_be_killed, nothing), table.spawn(wait_to_be_killed, nothing)
os.kill = lambda pid, number: threading.Timer(0.5, kill, (pid, number)).start()
print(table.kill_all_but([spared]), table.ended(spared), table.ended(stranger))
os.kill = kill
table.end()
"""


def test_what_is_slow_to_end_costs_the_spared_nothing() -> None:
    """On a busy machine a process that was killed waits for a core to end on; the interpreter must not go with it."""
    done = subprocess.run([sys.executable, "-c", SLOW_TO_END], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True False True\n"
