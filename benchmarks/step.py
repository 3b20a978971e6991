"""Where each CPU second of a training step goes, by process and by part.

    penstock bench step --json

One `penstock run` of recipes/calculator.yaml. The kernel's accounts of its processes are read while it lives: `start`
is what was spent until the first step had ended, `cpu_per_step` what each step after it took, `end` what came after the
last. From the first step to the end py-spy looks at the stack of every process a hundred times a second; what a process
spent is shared out by what was found there. A box's processes count as `boxes`, whatever started them; other processes
that one has started and waited for are its `helpers`. The first sampled token (`start_to_first_token_s`) is what the
counters of the run's servers show, asked ten times a second.

`attributed` is the share of all that the kernel charged to the run, waited-for children included, that a named process
has. Threads of torch that run no Python count where their process was. py-spy's own time is not in the figures; all
else about the machine should be quiet.

Environment: PENSTOCK_BENCH_STEPS (20), PENSTOCK_BENCH_ENGINE (hf; vllm, sglang), PENSTOCK_BENCH_STALENESS (the
recipe's), PENSTOCK_BENCH_RUN_TIMEOUT_S (900), PENSTOCK_BENCH_PROFILE (1; 0 leaves py-spy out).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.child import ROOT
from benchmarks.support.comparison import say
from benchmarks.support.cpu_account import CpuAccount
from benchmarks.support.first_token import FirstToken
from benchmarks.support.measure import processor
from benchmarks.support.reaper import reaped
from benchmarks.support.stacks import StackProfile, parts_of
from penstock.common import JsonlTail
from penstock.deploy import RunDir, load_config

RECIPE = ROOT / "recipes" / "calculator.yaml"
LOOK_S = 0.1


class RunFailed(Exception):
    """`penstock run` ended with an error, or took too long; the message ends with its last lines."""


@dataclass(frozen=True)
class StepExtent:
    """How much is measured, from the environment."""

    steps: int
    engine: str
    staleness: str | None
    timeout_s: float
    profile: bool

    @classmethod
    def read(cls) -> StepExtent:
        read = lambda name, default: os.environ.get(f"PENSTOCK_BENCH_{name}", default)  # noqa: E731
        return cls(
            int(read("STEPS", "20")),
            read("ENGINE", "hf"),
            read("STALENESS", "") or None,
            float(read("RUN_TIMEOUT_S", "900")),
            read("PROFILE", "1") != "0",
        )

    def overrides(self, runs: Path) -> list[str]:
        words = [
            "name=step",
            f"runs_dir={runs}",
            "data.eval=null",
            f"rollout.engine={self.engine}",
            f"trainer.steps={self.steps}",
            f"trainer.checkpoint_every={self.steps}",
        ]
        return words if self.staleness is None else [*words, f"max_staleness={self.staleness}"]


@dataclass
class MeasuredRun:
    """What a run has cost."""

    account: CpuAccount
    at_first: dict[str, float]
    """CPU seconds by process when the first step had ended"""
    at_last: dict[str, float]
    """When the last step had ended"""
    first_token_s: float
    """From the start of `penstock run`; 0: none was seen before the first step ended"""
    wall_first_s: float
    wall_last_s: float
    """When the last step's numbers were there"""
    wall_s: float
    kernel_s: float
    """All that the kernel charged to the run"""
    tokens: int
    """Sampled and trained on after the first step"""
    profile: StackProfile


def measure() -> dict[str, Any]:
    extent = StepExtent.read()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        run = _carry_out(extent, Path(folder))
        spent = run.account.by_process()
        steps = extent.steps - 1
        each = _difference(run.at_last, run.at_first, steps)
        figures = {
            "cpu_per_step": round(sum(each.values()), 3),
            "wall_per_step": round((run.wall_last_s - run.wall_first_s) / steps, 3),
            "tokens_per_step": round(run.tokens / steps),
            "processes": {name: _milliseconds(each[name]) for name in _largest_first(each)},
            "parts": _parts(run, each),
            "start": {name: round(value, 2) for name, value in run.at_first.items()},
            "start_to_first_token_s": round(run.first_token_s, 2),
            "end": {name: round(value, 2) for name, value in _difference(spent, run.at_last, 1).items()},
            "start_to_first_step_s": round(run.wall_first_s, 2),
            "last_step_to_exit_s": round(run.wall_s - run.wall_last_s, 2),
            "cpu_s": round(run.kernel_s, 2),
        }
    attributed = sum(spent.values()) / run.kernel_s
    setup = {"steps": extent.steps, "engine": extent.engine, "recipe": RECIPE.name, **processor()}
    return {"bench": "step", "ratio": {"attributed": round(attributed, 3)}, "figures": figures, "setup": setup}


def _carry_out(extent: StepExtent, folder: Path) -> MeasuredRun:
    """Raises `RunFailed`."""
    overrides = extent.overrides(folder)
    place, log = RunDir.of(load_config(RECIPE, overrides)), folder / "run.log"
    before, began = _children_s(), time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile torch and the rest again
    command = reaped([sys.executable, "-m", "penstock.deploy.cli", "run", str(RECIPE), *overrides])
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    account, profile, tail = CpuAccount(process.pid), StackProfile(folder), JsonlTail(place.metrics)
    first, at_first, at_last = FirstToken(place.connect_env), dict[str, float](), dict[str, float]()
    first_token_s = wall_first_s = wall_last_s = 0.0
    tokens = 0
    try:
        while process.poll() is None:
            account.look()
            if not at_first and first.look():
                first_token_s = time.monotonic() - began
            for row in tail.read():
                at_last, wall_last_s = account.by_process(), time.monotonic() - began
                if at_first:
                    tokens += row["tokens"]
                    continue
                at_first, wall_first_s = at_last, wall_last_s
                say(f"step: the first of {extent.steps} steps ended after {wall_first_s:.1f} s")
                if extent.profile:
                    profile.attach(account.profiled())
            if time.monotonic() - began > extent.timeout_s:
                raise RunFailed(f"longer than {extent.timeout_s:.0f} s; PENSTOCK_BENCH_RUN_TIMEOUT_S allows more")
            time.sleep(LOOK_S)  # nothing else waits in this process
    finally:
        _stop(process)
    kernel_s, wall_s = _children_s() - before, time.monotonic() - began
    profile.close()
    if process.returncode or not at_first:
        raise RunFailed(f"exit status {process.returncode}\n{log.read_text(errors='replace')[-2000:]}")
    walls = (first_token_s, wall_first_s, wall_last_s, wall_s)
    return MeasuredRun(account, at_first, at_last, *walls, kernel_s, tokens, profile)


def _difference(later: dict[str, float], earlier: dict[str, float], steps: int) -> dict[str, float]:
    """Process → CPU seconds per step."""
    return {name: max(0.0, later[name] - earlier.get(name, 0.0)) / steps for name in later}


def _children_s() -> float:
    """CPU seconds of all ended children of this process, and of theirs; py-spy's is waited for later."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _parts(run: MeasuredRun, each: dict[str, float]) -> dict[str, dict[str, float]]:
    """Process → part → milliseconds per step, largest first."""
    found: dict[str, dict[str, float]] = {}
    for name in _largest_first(each):
        shares = parts_of(name, run.profile.stacks(name))
        if shares:
            found[name] = {part: _milliseconds(each[name] * shares[part]) for part in _largest_first(shares)}
    return found


def _largest_first(amounts: dict[str, float]) -> list[str]:
    return sorted(amounts, key=lambda name: -amounts[name])


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)
