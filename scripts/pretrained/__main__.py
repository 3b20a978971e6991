"""Runs of recipes/smollm2/sums.py whose figures and pictures stand in the documentation.

    recipes     three seeds of full fine-tuning and of LoRA; evaluations of unseen sums before and after
    staleness   max_staleness 0, 1, 2, 4 and 8, with and without correction, three seeds (`penstock bench learning`)
    exactness   differences of the logprobs of engine and trainer over 10,000 sampled tokens, by engine and dtype

Runs are kept in the folder of --out, and one that has ended is not run again. Figures are written to evidence.json in
that folder, pictures to docs/images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.support.learning_picture import draw_curves
from benchmarks.support.learning_run import Curve
from benchmarks.support.measure import processor
from penstock.common import last_by, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RECIPE = "recipes/smollm2/sums.py"
MODEL = "smollm2-135m"
SEEDS = (0, 1, 2)
VARIANTS: Mapping[str, Sequence[str]] = {
    "full fine-tuning": (),
    "LoRA of rank 16": ("trainer.lora.rank=16", "trainer.lr=1e-3"),
}
ENGINES = ("hf", "vllm", "sglang")
TOKENS = 10_000
"""Sampled tokens whose logprobs `exactness` compares."""
Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "evidence", help="folder of the runs")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; known are {', '.join(PARTS)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    penstock("model", "fetch", MODEL, log=out / "fetch.log")
    for part in options.parts or PARTS:
        figures = {part: PARTS[part](out), "setup": setup()}
        file = out / "evidence.json"
        earlier = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**earlier, **figures}, indent=1) + "\n")
        print(json.dumps(figures, indent=1), flush=True)


def setup() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"commit": commit.stdout.strip(), **versions, **processor()}


def penstock(*words: str, log: Path) -> None:
    """Run a command of penstock; its output goes to `log`. Raises SystemExit with the last lines if it fails."""
    print(f"penstock {' '.join(words)}", flush=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "penstock.deploy.cli", *words]
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, env=os.environ, check=False).returncode
    if status:
        raise SystemExit(f"exit status {status}, see {log}:\n{log.read_text()[-2000:]}")


def run_whole(out: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Return the steps of a run of the recipe: one that has ended is not run again, another is continued."""
    root = out / name
    if not (root / "summary.json").exists():
        resume = ["--resume"] if root.exists() else []
        words = ("run", RECIPE, f"name={name}", f"runs_dir={out}", *overrides, *resume)
        penstock(*words, log=out / f"{name}.log")
    return last_by(read_jsonl(root / "metrics.jsonl"), "step")


def evaluate(out: Path, name: str, *words: str) -> dict[str, Any]:
    """Return avg@8 over the unseen sums, with its interval."""
    file = out / f"{name}.json"
    if not file.exists():
        penstock("eval", *words, f"runs_dir={out}", "--json", log=out / f"{name}.log")
        file.write_text((out / f"{name}.log").read_text().splitlines()[-1])
    return json.loads(file.read_text())


def recipes(out: Path) -> Figures:
    curves: dict[str, list[Curve]] = {}
    figures: Figures = {"before": evaluate(out, "before", RECIPE, "name=before")}
    for variant, overrides in VARIANTS.items():
        for seed in SEEDS:
            name = f"{variant.split()[0].lower()}-{seed}"
            rows = run_whole(out, name, f"seed={seed}", *overrides)
            curves.setdefault(variant, []).append(Curve.of(rows))
            figures[name] = {
                "reward_first": mean(row["reward"] for row in rows[:3]),
                "reward_last": mean(row["reward"] for row in rows[-3:]),
                "seconds": sum(row["wall_s"] for row in rows),
                "after": evaluate(out, f"after-{name}", str(out / name)),
            }
    draw_curves(curves, "recipes/smollm2/sums.py", IMAGES / "learn_smollm2.svg")
    return figures


def staleness(out: Path) -> Figures:
    settings = {"RECIPE": RECIPE, "FOLDER": str(out / "staleness"), "STEPS": "20", "GROUPS": "4"}
    settings |= {"PICTURE": str(IMAGES / "staleness_smollm2.svg"), "RUN_TIMEOUT_S": "7200"}
    environment = {**os.environ, **{f"PENSTOCK_BENCH_{key}": value for key, value in settings.items()}}
    command = [sys.executable, "-m", "penstock.deploy.cli", "bench", "learning", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def exactness(out: Path) -> Figures:
    figures: Figures = {}
    for engine in ENGINES:
        if engine != "hf" and not (ROOT / f".venv-{engine}").exists():
            print(f"{engine}: left out; scripts/setup-{engine} installs it", flush=True)
            continue
        for dtype in ("float32", "bfloat16"):
            figures[f"{engine} {dtype}"] = _differences(out, engine, dtype)
    return figures


def _differences(out: Path, engine: str, dtype: str) -> Figures:
    """Return the mean and the largest |difference| of logprobs of equal weights: steps are synchronous."""
    sampled = ("groups_per_step=16", "agent.max_new_tokens=32", "agent.max_response_tokens=32")
    words = ("max_staleness=sync", f"rollout.engine={engine}", f"rollout.dtype={dtype}", f"trainer.dtype={dtype}")
    rows = run_whole(out, f"exact-{engine}-{dtype}", *words, *sampled, "trainer.steps=6", "data.eval=null")
    tokens = sum(row["logprob_abs_diff_tokens"] for row in rows)
    return {
        "tokens": tokens,
        "mean": sum(row["logprob_abs_diff_mean"] * row["logprob_abs_diff_tokens"] for row in rows) / tokens,
        "max": max(row["logprob_abs_diff_max"] for row in rows),
        "enough": tokens >= TOKENS,
    }


PARTS: Mapping[str, Callable[[Path], Figures]] = {
    "recipes": recipes,
    "staleness": staleness,
    "exactness": exactness,
}

if __name__ == "__main__":
    main()
