"""A `penstock` command of this repository, with what it costs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.support.child import ROOT, stop_run
from benchmarks.support.comparison import say
from benchmarks.support.learning_run import RunFailed, run_environment


def run_command(bench: str, folder: Path, command: str, *words: str) -> float:
    """Return the CPU seconds of a command and all that it started; its output is appended to a file in `folder`.
    Raises `RunFailed`."""
    say(f"{bench}: penstock {command} {words[0]}")
    before, log = resource.getrusage(resource.RUSAGE_CHILDREN), folder / f"{command}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.deploy.cli", command, *words],
            stdout=output,
            stderr=output,
            env=run_environment(),
            cwd=ROOT,
        )
        try:
            process.wait()
        finally:
            stop_run(process)
    if process.returncode:
        raise RunFailed(f"penstock {command}: exit status {process.returncode}\n{log.read_text()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
