"""Steps until the student earns nearly what its teacher earns: with the teacher, and by GRPO alone.

    penstock sft recipes/distill/cpu.yaml sft.out=data/distill/teacher
    python -m benchmarks.support.distill_comparison --teacher data/distill/teacher --out runs/distill-comparison

Each cell is a `penstock run` of cpu.yaml that ends when the mean reward of three steps is at the goal; `GRPO alone` has
the optimizer of recipes/calculator.yaml, `top 8` learns from the teacher's likeliest ids, not from sampled tokens.
Writes comparison.json and comparison.png into --out; a run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.child import stop_run

RECIPE = Path(__file__).parents[2] / "recipes/distill/cpu.yaml"
COMMAND = [sys.executable, "-m", "penstock.deploy.cli"]
TOKEN = "PENSTOCK_TEACHER_TOKEN"  # noqa: S105 - the name of a variable
WINDOW = 3
UNTAUGHT = ("agent.teachers={}", "trainer.distill.in_advantage=0")
TOP_8 = ("agent.teachers.*.top_k=8", "trainer.distill.in_advantage=0", "trainer.distill.in_loss=1.0")
CELLS: Mapping[str, Sequence[str]] = {
    "GRPO alone": (*UNTAUGHT, "trainer.lr=7e-4", "trainer.warmup_steps=3", "trainer.max_grad_norm=0.3"),
    "GRPO alone, same optimizer": UNTAUGHT,
    "teacher and GRPO": (),
    "teacher alone": ("trainer.distill.reward_weight=0",),
    "top 8 and GRPO": TOP_8,
    "top 8 alone": (*TOP_8, "trainer.distill.reward_weight=0"),
}
TEACHER_START_S = 180.0
RUN_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with teacher(options.teacher, options.out) as (url, environment):
        curves = {
            cell: {seed: _curve(options, cell, seed, url, environment) for seed in options.seeds}
            for cell in options.cells
        }
    comparison = {
        "goal": options.goal,
        "steps": {
            cell: {seed: steps_to(rewards, options.goal) for seed, rewards in of.items()} for cell, of in curves.items()
        },
        "rewards": curves,
    }
    (options.out / "comparison.json").write_text(json.dumps(comparison, indent=1))
    draw(curves, options.goal, options.out / "comparison.png")
    print(json.dumps(comparison["steps"], indent=1))
    return comparison


def steps_to(rewards: Sequence[float], goal: float) -> int | None:
    """Steps until the mean of the last `WINDOW` is at the goal; None: never."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if sum(rewards[end - WINDOW : end]) / WINDOW >= goal), None)


@contextmanager
def teacher(model: str, out: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(URL, environment with its token) of a server that ends with this block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, TOKEN: os.environ.get(TOKEN) or secrets.token_hex(16)}
    command = ["teacher-server", "--model", model, "--port", str(port)]
    with started(command, environment, out / "teacher.log") as process:
        _wait_until_up(process, f"http://127.0.0.1:{port}", environment[TOKEN])
        yield f"http://127.0.0.1:{port}", environment


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `penstock` command that ends with this block."""
    with log.open("ab") as file:
        process = subprocess.Popen([*COMMAND, *command], env=environment, stdout=file, stderr=file)
        try:
            yield process
        finally:
            stop_run(process)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, token: str) -> None:
    deadline = time.monotonic() + TEACHER_START_S
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()  # noqa: S310 - our own server
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the teacher is not up: {error}; see teacher.log") from error
            time.sleep(0.5)  # a program without an event loop


def _curve(options: argparse.Namespace, cell: str, seed: int, url: str, environment: dict[str, str]) -> list[float]:
    """Reward by step."""
    name = f"{cell.replace(', ', '-').replace(' ', '-').lower()}-{seed}"
    folder = options.out / name
    if not (folder / "summary.json").exists():
        settings = [
            f"name={name}",
            f"runs_dir={options.out.resolve()}",
            f"seed={seed}",
            f"trainer.steps={options.steps}",
            "data.eval=null",
        ]
        goal = {"metric": "reward", "target": options.goal, "window": WINDOW}
        stop = [f"trainer.stop.{key}={value}" for key, value in goal.items()]
        taught = ["agent.teachers={'*': {url: '" + url + "'}}"]
        again = ["--resume"] if folder.exists() else []
        command = ["run", str(RECIPE), *settings, *stop, *taught, *CELLS[cell], *options.override, *again]
        log = options.out / f"{name}.log"
        with started(command, environment, log) as process:
            if process.wait(RUN_S):
                raise SystemExit(f"{name} failed; see {log}")
    return [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(curves: Mapping[str, Mapping[int, Sequence[float]]], goal: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (cell, of) in enumerate(curves.items()):
        for index, rewards in enumerate(of.values()):
            steps = range(1, len(rewards) + 1)
            axes.plot(steps, rewards, color=f"C{number}", alpha=0.8, label=cell if not index else None)
    axes.axhline(goal, color="grey", linestyle=":", label="goal")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--teacher", default="data/distill/teacher", help="folder of the teacher")
    parser.add_argument("--out", type=Path, default=Path("runs/distill-comparison"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=["GRPO alone", "teacher and GRPO"])
    parser.add_argument("--goal", type=float, default=0.9, help="mean reward of three steps")
    parser.add_argument("--steps", type=int, default=50, help="most steps of a run; the schedule decays over them")
    parser.add_argument("--override", nargs="*", default=[], help="further settings of the runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    main()
