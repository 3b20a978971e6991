"""Whole runs that `scripts/gpu-check` makes, and what must hold after each of them.

    python -m benchmarks.support.gpu_runs colocated FOLDER --engine vllm --level 2 [KEY=VALUE…]
    python -m benchmarks.support.gpu_runs ranks FOLDER [KEY=VALUE…]
    python -m benchmarks.support.gpu_runs gsm8k FOLDER --model MODEL --data GSM8K [--no-colocated] [KEY=VALUE…]

A run's figures and what is wrong with it are written into FOLDER/run-NAME.json; the exit status is 1 where something
is. On a machine without a GPU the same runs are made on CPUs, with the engine hf unless another is named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.support.child import ROOT, stop_run
from benchmarks.support.comparison import say
from benchmarks.support.learning_run import RunFailed, run_environment
from penstock.common import last_by, read_jsonl
from penstock.deploy import RunDir, load_config

CALCULATOR = ROOT / "recipes" / "calculator.yaml"
GSM8K = ROOT / "recipes" / "retool" / "gpu1.yaml"
SHARE = 0.4
"""Of the GPU's memory, for the engine's turn. The calculator needs next to nothing: what is left shows what is kept."""
GPU_ARGUMENTS = {
    "vllm": f"rollout.vllm_args={{gpu_memory_utilization: {SHARE}}}",
    "sglang": f"rollout.sglang_args={{mem_fraction_static: {SHARE}}}",
}
MOST_APART = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |logprob of the engine − of the trainer|; of weights that are not the version's it is above 1."""
SAMPLE_S = 1.0
MIB = 1 << 20


@dataclass(frozen=True)
class GpuRun:
    """A recipe with changes, to be run to its end."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    steps: int
    timeout_s: float
    dtype: str
    """The coarser one of both sides'."""
    on_gpu: bool


@dataclass(frozen=True)
class MemorySample:
    """Memory in use on all GPUs of the machine together."""

    at_s: float
    """Unix seconds."""
    bytes: int


def colocated(engine: str, level: int, *, on_gpu: bool, more: Sequence[str] = ()) -> GpuRun:
    """The calculator, its engine and its trainer in turns on one device."""
    words = (
        "placement.colocated=true",
        f"placement.sleep_level={level}",
        f"rollout.engine={engine}",
        "data.eval_limit=32",
        "agent.episode_deadline_s=1200",  # the trainer's turns count
        *_in_bfloat16(engine, on_gpu=on_gpu),
    )
    return _calculator(f"colocated-{engine}-{level}", words, more, on_gpu=on_gpu)


def one_step(*, on_gpu: bool, more: Sequence[str] = ()) -> GpuRun:
    """A step of the calculator on one trainer rank. Its engine is hf, on the CPU."""
    words = ("data.eval=null", *(("trainer.dtype=bfloat16",) if on_gpu else ()))
    return _calculator("one-step", words, ("trainer.steps=1", *more), on_gpu=on_gpu)


def ranks(*, on_gpu: bool, more: Sequence[str] = ()) -> GpuRun:
    """The calculator on two trainer ranks: over NCCL on two GPUs, over gloo on CPUs. Its engine is hf, on the CPU."""
    words = ("trainer.ranks=2", "data.eval=null", *(("trainer.dtype=bfloat16",) if on_gpu else ()))
    return _calculator("ranks", words, more, on_gpu=on_gpu)


def gsm8k(model: Path, rows: Path, *, in_turns: bool, on_gpu: bool, more: Sequence[str] = ()) -> GpuRun:
    """ReTool's recipe for one GPU on the rows of the folder `rows`."""
    words = (
        f"model={model.resolve()}",
        f"data.train={rows / 'train.parquet'}",
        f"data.eval={rows / 'test.parquet'}",
        "data.eval_limit=64",
        f"placement.colocated={str(in_turns).lower()}",
        "agent.episode_deadline_s=1200",
    )
    return _run("gsm8k", GSM8K, (*words, "trainer.steps=20", *more), timeout_s=7200.0, on_gpu=on_gpu)


def _calculator(name: str, words: Sequence[str], more: Sequence[str], *, on_gpu: bool) -> GpuRun:
    return _run(name, CALCULATOR, (*words, "trainer.steps=6", *more), timeout_s=1500.0, on_gpu=on_gpu)


def _run(name: str, recipe: Path, words: Sequence[str], *, timeout_s: float, on_gpu: bool) -> GpuRun:
    """Of several words for one key the last one counts."""
    given = dict(word.split("=", 1) for word in ("trainer.save_trajectories=0", *words))
    config = load_config(recipe, overrides := [f"{key}={value}" for key, value in given.items()])
    dtype = "bfloat16" if "bfloat16" in (config.trainer.dtype, config.rollout.dtype) else "float32"
    return GpuRun(name, recipe, tuple(overrides), config.trainer.steps, timeout_s, dtype, on_gpu)


def _in_bfloat16(engine: str, *, on_gpu: bool) -> tuple[str, ...]:
    if not on_gpu or engine not in GPU_ARGUMENTS:
        return ()
    return "rollout.dtype=bfloat16", "trainer.dtype=bfloat16", GPU_ARGUMENTS[engine]


def carry_out(run: GpuRun, folder: Path) -> dict[str, Any]:
    """Run it from its start to its end; returns `report_of`. Raises `RunFailed` where it does not end well."""
    place, log = RunDir(folder / "runs" / run.name), folder / f"run-{run.name}.log"
    if place.root.exists():
        shutil.rmtree(place.root)
    command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(run.recipe), f"name={run.name}"]
    command += [f"runs_dir={folder / 'runs'}", *run.overrides]
    environment = {**run_environment(), "NCCL_DEBUG": "VERSION"}
    with memory_watched() as samples, log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        try:
            status = process.wait(run.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{run.name}: longer than {run.timeout_s:.0f} s, see {log}") from error
        finally:
            stop_run(process)
    if status:
        raise RunFailed(f"{run.name}: exit status {status}, see {log}\n{log.read_text(errors='replace')[-2000:]}")
    return report_of(run, place, samples)


def report_of(run: GpuRun, place: RunDir, samples: Sequence[MemorySample]) -> dict[str, Any]:
    """run, `figures`, and `wrong`: what does not hold, in words; nothing where all is well."""
    summary = json.loads(place.summary.read_text())
    rows = last_by(read_jsonl(place.metrics), "step")
    turns = read_jsonl(place.turns)
    figures = {**_of_steps(rows), **_of_updates(read_jsonl(place.weight_updates)), **_of_summary(summary)}
    if turns:
        figures["turns"] = {side: len(held) for side, held in spans(turns).items()}
        figures["device_bytes"] = memory_by_turn(turns, samples)
    wrong = [*wrong_accounts(run, summary), *wrong_turns(run, turns)]
    if run.name == "ranks" and run.on_gpu and "NCCL version" not in _logs(place):
        wrong.append("no log of the trainer names NCCL's version: its ranks did not meet over NCCL")
    return {"run": run.name, "dtype": run.dtype, "figures": figures, "wrong": wrong}


def _logs(place: RunDir) -> str:
    return "".join(file.read_text(errors="replace") for file in sorted((place.root / "logs").glob("*.log")))


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    wall_s = sum(row["wall_s"] for row in rows)
    found = {
        "reward_first_3": [row["reward"] for row in rows[:3]],
        "reward_last_3": [row["reward"] for row in rows[-3:]],
        "kl_k3_mean": fmean(row["kl_k3"] for row in rows),
        "kl_k3_max": max(row["kl_k3"] for row in rows),
        "publish_s_mean": fmean(row["publish_s"] for row in rows),
        "step_s_mean": wall_s / len(rows),
        "waited_share": sum(row["wait_s"] for row in rows) / wall_s,
        "trainer_tokens_per_s": sum(row["tokens"] for row in rows) / sum(row["train_s"] for row in rows),
        "rollout_tokens_per_s": sum(row["tokens_sampled"] for row in rows) / wall_s,
    }
    # The first step compiles and warms up.
    speeds = [row["mfu"] for row in rows[1:] or rows if "mfu" in row]
    return found | ({"mfu_mean": fmean(speeds)} if speeds else {})


def _of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pauses = [update["pause_s"] for update in updates]
    return {"pause_s_mean": fmean(pauses), "pause_s_max": max(pauses)} if pauses else {}


def _of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("steps", "wall_s", "episodes", "episodes_trained", "lost", "trained_twice", "token_mismatches"),
        *("episodes_failed", "staleness_mean", "staleness_max", "logprob_abs_diff_mean", "eval_reward"),
    )
    return {name: summary[name] for name in names} | {"restarts": sum(summary["restarts"].values())}


def wrong_accounts(run: GpuRun, summary: Mapping[str, Any]) -> Iterator[str]:
    """Invariants 1 and 2, and whether the trainer computes what the engine sampled."""
    if summary["steps"] != run.steps:
        yield f"{summary['steps']} of {run.steps} steps"
    for name in ("lost", "trained_twice", "token_mismatches", "episodes_failed"):
        if summary[name]:
            yield f"{name} is {summary[name]}"
    if restarts := {name: count for name, count in summary["restarts"].items() if count}:
        yield f"processes were started again: {restarts}"
    apart = summary["logprob_abs_diff_mean"]
    if apart is None or not apart <= MOST_APART[run.dtype]:
        yield f"logprob_abs_diff_mean is {apart}, more than {MOST_APART[run.dtype]} in {run.dtype}"


def wrong_turns(run: GpuRun, turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """`turns`: lines of turns.jsonl. Both sides have turns, never at once, and give back what they claimed."""
    if "placement.colocated=true" not in run.overrides:
        return
    held = spans(turns)
    for side in ("engine", "trainer"):
        if not held.get(side):
            yield f"turns.jsonl has no turn of the {side}"
    both = sorted((span, side) for side, found in held.items() for span in found)
    for (earlier, side), (later, other) in pairwise(both):
        if side != other and later[0] < earlier[1]:
            yield f"at {later[0]:.1f} s the {other} held the devices, and the {side} until {earlier[1]:.1f} s"
    if len(held.get("trainer", [])) < run.steps // 2:
        yield f"{len(held.get('trainer', []))} turns of the trainer in {run.steps} steps"


def spans(turns: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Side → (from, to) [s] of each of its turns; several engines hold the devices together. The last may be open."""
    found: dict[str, list[tuple[float, float]]] = {}
    begun: dict[str, float] = {}
    holding: dict[str, set[str]] = {}
    end = turns[-1]["at_s"] if turns else 0.0
    for turn in turns:
        holders = holding.setdefault(turn["side"], set())
        before = bool(holders)
        (holders.add if turn["holds"] else holders.discard)(turn["holder"])
        if holders and not before:
            begun[turn["side"]] = turn["at_s"]
        elif before and not holders:
            found.setdefault(turn["side"], []).append((begun.pop(turn["side"]), turn["at_s"]))
    for side, start in begun.items():
        found.setdefault(side, []).append((start, end))
    return found


def memory_by_turn(turns: Sequence[Mapping[str, Any]], samples: Sequence[MemorySample]) -> dict[str, int]:
    """Most bytes in use in the turns of each side; empty where nothing was sampled.

    The queue's clock, which turns have, began as this machine's.
    """
    found: dict[str, int] = {}
    for side, held in spans(turns).items():
        within = [sample.bytes for sample in samples for start, end in held if start <= sample.at_s <= end]
        if within:
            found[side] = max(within)
    return found


@contextmanager
def memory_watched() -> Iterator[list[MemorySample]]:
    """What nvidia-smi says, every `SAMPLE_S` until the end of the block; nothing where there is no GPU."""
    samples: list[MemorySample] = []
    if not has_gpu():
        yield samples
        return
    over = threading.Event()

    def watch() -> None:
        try:
            while not over.wait(SAMPLE_S):
                samples.append(MemorySample(time.time(), used_bytes()))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            say(f"memory of the GPUs is not watched from now on: {error}")

    watching = threading.Thread(target=watch, name="memory of GPUs", daemon=True)
    watching.start()
    try:
        yield samples
    finally:
        over.set()
        watching.join(60)


def used_bytes() -> int:
    """Of all GPUs together. Raises `ValueError` where a driver does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return sum(int(line) * MIB for line in said.split())


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def prepared_rows(data: Path, folder: Path) -> Path:
    """The folder with GSM8K's rows as the recipe reads them. Raises `RunFailed`."""
    out = folder / "gsm8k-rows"
    command = [sys.executable, "recipes/retool/data.py", "gsm8k", "--input", str(data.resolve()), "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=run_environment(), capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RunFailed(f"gsm8k: {done.stderr.strip() or done.stdout.strip()}")
    return out


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("one-step", "colocated", "ranks", "gsm8k"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="hf", choices=("hf", "vllm", "sglang"), help="colocated: rollout.engine")
    parser.add_argument("--level", type=int, default=1, choices=(1, 2), help="colocated: placement.sleep_level")
    parser.add_argument("--model", type=Path, help="gsm8k: folder of the model")
    parser.add_argument("--data", type=Path, help="gsm8k: folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument(
        "--colocated", action=argparse.BooleanOptionalAction, default=True, help="gsm8k: placement.colocated"
    )
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="further settings of the recipe")
    found = parser.parse_intermixed_args(arguments)
    if bad := [word for word in found.more if "=" not in word]:
        parser.error(f"{bad[0]}: a setting is KEY=VALUE")
    if found.kind == "gsm8k" and not (found.model and found.data):
        parser.error("gsm8k needs --model and --data")
    return found


def planned(options: argparse.Namespace) -> GpuRun:
    """Prepares its data. Raises `RunFailed`."""
    on_gpu = has_gpu()
    if options.kind == "colocated":
        return colocated(options.engine, options.level, on_gpu=on_gpu, more=options.more)
    if options.kind == "one-step":
        return one_step(on_gpu=on_gpu, more=options.more)
    if options.kind == "ranks":
        return ranks(on_gpu=on_gpu, more=options.more)
    rows = prepared_rows(options.data, options.folder)
    return gsm8k(options.model, rows, in_turns=options.colocated, on_gpu=on_gpu, more=options.more)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        run = planned(options)
        report = carry_out(run, options.folder)
    except RunFailed as error:
        sys.exit(str(error))
    file = options.folder / f"run-{run.name}.json"
    file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    if report["wrong"]:
        sys.exit("\n".join(f"{run.name}: {text}" for text in report["wrong"]))


if __name__ == "__main__":
    main()
