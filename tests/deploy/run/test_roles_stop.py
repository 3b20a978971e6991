"""A role that is told to stop more than once still ends in order; one that refuses its job says so in one sentence."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.deploy.run.roles import seed_of_server

REPOSITORY = Path(__file__).parents[3]
ROLE = """
import asyncio, sys
from penstock.deploy.run.roles import run_role

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


REFUSES = """
from penstock.deploy.run.roles import fatal, run_role

async def main():
    with fatal(ValueError, OSError):
        {cause}

run_role(main)
"""
ENVIRONMENT: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}


@pytest.mark.parametrize(
    ("cause", "traced"), [("raise ValueError('no such model')", False), ("open('/no such file')", True)]
)
def test_a_refused_job_is_one_sentence(cause: str, *, traced: bool, tmp_path: Path) -> None:
    stop_file = tmp_path / "why.stop"
    ran = subprocess.run(
        [sys.executable, "-c", REFUSES.format(cause=cause)],
        env={**ENVIRONMENT, "PENSTOCK_STOP_FILE": str(stop_file)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1
    assert ("Traceback" in ran.stderr) == traced, ran.stderr
    assert stop_file.read_text().strip() in ran.stderr


@pytest.mark.parametrize("more", [0, 2])
def test_a_second_term_does_not_cut_off_the_first(more: int) -> None:
    role = subprocess.Popen(
        [sys.executable, "-c", ROLE], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


def test_no_two_servers_sample_alike() -> None:
    names = [f"rollout-{number}" for number in range(64)] + ["rollout-eval"]
    seeds = [seed_of_server(7, name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [seed_of_server(7, name) for name in names], "a server that is started again is the same one"
    assert all(0 <= seed < 1 << 31 for seed in seeds), "engines take a signed number"
    assert seed_of_server(8, "rollout-0") != seeds[0]
