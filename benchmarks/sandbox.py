"""What a box costs beside the command line that makes one by hand.

    penstock bench sandbox --json

session_exec   a command in a box that is open       `bwrap … true`, `docker exec … true`
start          a fresh box, ready for a command      `bwrap … true`, `docker run --rm … true`
exec           start, one command, close             the same
boxes_per_s    `exec` by several callers at once     the same by as many

Each sample has every operation once on both sides, in changing order, so that what disturbs the machine disturbs all
alike. Every command is `true`, which does nothing.

Environment: PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_SAMPLES (20, per round), PENSTOCK_BENCH_BACKENDS
(bwrap,remote,docker; those that cannot work here are named in `setup`), PENSTOCK_BENCH_IMAGE (penstock-box:base).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import uvloop

from benchmarks.support.boxes import NOTHING, BoxSide, open_side, run_bare, run_in
from benchmarks.support.comparison import in_turn, say
from benchmarks.support.measure import processor, quantile
from penstock.sandbox import SandboxConfig, SandboxError

OPERATIONS = ("session_exec", "start", "exec")
CALLERS = 4
Samples = dict[str, list[float]]
"""operation, ours and ``bare_…`` → seconds"""


@dataclass(frozen=True)
class SandboxExtent:
    """How much is measured, from the environment."""

    rounds: int
    samples: int
    backends: list[str]
    image: str

    @classmethod
    def read(cls) -> SandboxExtent:
        return cls(
            int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "5")),
            int(os.environ.get("PENSTOCK_BENCH_SAMPLES", "20")),
            os.environ.get("PENSTOCK_BENCH_BACKENDS", "bwrap,remote,docker").split(","),
            os.environ.get("PENSTOCK_BENCH_IMAGE", "penstock-box:base"),
        )


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


async def _measure() -> dict[str, Any]:
    extent = SandboxExtent.read()
    config = SandboxConfig(image=extent.image, max_boxes=2 * CALLERS)
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for backend in extent.backends:
        try:
            async with open_side(backend, config) as side:
                figures[backend] = _figures(await _rounds(side, extent))
        except SandboxError as error:
            missing[backend] = str(error)
        say(f"sandbox: {backend} {missing.get(backend, 'done')}")
    setup = {**processor(), "rounds": extent.rounds, "samples_per_round": extent.samples, "callers": CALLERS}
    return {"bench": "sandbox", "ratio": _ratios(figures), "figures": figures, "setup": {**setup, "missing": missing}}


async def _rounds(side: BoxSide, extent: SandboxExtent) -> Samples:
    """One unmeasured sample first."""
    await _sample(side, {}, 0)
    taken: Samples = {}
    for number in range(extent.rounds):
        for sample in range(extent.samples):
            await _sample(side, taken, sample)
        for bare in (False, True) if number % 2 else (True, False):
            rate = await _boxes_per_s(side, bare, extent.samples)
            taken.setdefault("bare_boxes_per_s" if bare else "boxes_per_s", []).append(rate)
    return taken


async def _sample(side: BoxSide, taken: Samples, number: int) -> None:
    for name, work in in_turn(list(_work(side).items()), number):
        began = time.perf_counter()
        cleanup = await work()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        if cleanup is not None:
            await cleanup()


Cleanup = Callable[[], Awaitable[None]]


def _work(side: BoxSide) -> dict[str, Callable[[], Awaitable[Cleanup | None]]]:
    """Operation → what is timed; it may return what is to be done afterwards, untimed."""

    async def start() -> Cleanup:
        return (await side.sandbox.start("bench")).close

    async def bare(command: list[str]) -> None:
        run_bare(command)

    return {
        "session_exec": lambda: run_in(side.session, NOTHING),
        "bare_session_exec": lambda: bare([*side.bare_exec, *NOTHING]),
        "start": start,
        "exec": lambda: _once(side),
        "bare_start": lambda: bare([*side.bare_run, *NOTHING]),
        "bare_exec": lambda: bare([*side.bare_run, *NOTHING]),
    }


async def _once(side: BoxSide) -> None:
    session = await side.sandbox.start("bench")
    try:
        await run_in(session, NOTHING)
    finally:
        await session.close()


async def _boxes_per_s(side: BoxSide, bare: bool, each: int) -> float:
    async def caller() -> None:
        for _ in range(each):
            if bare:
                await asyncio.to_thread(run_bare, [*side.bare_run, *NOTHING])
            else:
                await _once(side)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return CALLERS * each / (time.perf_counter() - began)


def _figures(taken: Samples) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in (*OPERATIONS, *(f"bare_{name}" for name in OPERATIONS)):
        figures[f"{name}_p50_ms"] = _ms(quantile(taken[name], 0.5))
        figures[f"{name}_p99_ms"] = _ms(quantile(taken[name], 0.99))
    for name in ("boxes_per_s", "bare_boxes_per_s"):
        figures[name] = round(median(taken[name]), 1)
    return figures


def _ratios(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ratio → backend → of the medians."""
    ratios = {
        f"{name}_over_bare": {b: _over(f[f"{name}_p50_ms"], f[f"bare_{name}_p50_ms"]) for b, f in figures.items()}
        for name in OPERATIONS
    }
    ratios["boxes_per_s_over_bare"] = {b: _over(f["boxes_per_s"], f["bare_boxes_per_s"]) for b, f in figures.items()}
    return ratios


def _over(ours: float, bare: float) -> float:
    return round(ours / bare, 3)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
