"""The new tokens that a run with a broken reward needs after its repair, compared with a run from the start.

    penstock bench rescore --json

clean      the calculator recipe with its reward
broken     the same with a broken reward, 30 steps: `silent` is 0 for every answer, `lenient` 1 for every number
repaired   `penstock rescore` of the broken run's steps with the recipe's reward, and a run from the model that it left,
           of 30 % of the clean run's steps

The goal is the mean reward of the clean run's last five steps, less 0.01. A run has reached it at the first step whose
reward and those of the two before it have that mean. Tokens are those that were sampled for the steps up to there.

Environment: PENSTOCK_BENCH_STEPS (50) of the clean run, PENSTOCK_BENCH_GROUPS (8) of eight episodes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.support.command import run_command
from benchmarks.support.learning_run import CALCULATOR, LAST, WINDOW, Curve, reward_at_end, smoothed
from benchmarks.support.measure import processor
from penstock.common import last_by, read_jsonl

BROKEN = ("silent", "lenient")
"""Functions of `benchmarks.support.broken_rewards`."""
SHARE = 0.3
"""Share of the clean run's tokens within which a repaired run should reach the goal."""
NOISE = 0.01
"""The standard error of the mean over five steps of 64 episodes, 97 % of them right."""


def measure() -> dict[str, Any]:
    steps, groups = (int(os.environ.get(f"PENSTOCK_BENCH_{name}", of)) for name, of in (("STEPS", 50), ("GROUPS", 8)))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        clean = _run(folder, CALCULATOR, "clean", steps, f"groups_per_step={groups}")
        goal = reward_at_end(clean) - NOISE
        sides = {kind: _repaired(folder, kind, steps, groups) for kind in BROKEN}
    figures, ratio = _compared(clean, goal, sides)
    setup = {**processor(), "steps": steps, "broken_steps": _broken(steps), "groups": groups}
    setup |= {"window": WINDOW, "last": LAST, "share": SHARE}
    return {"bench": "rescore", "ratio": ratio, "figures": figures, "setup": setup}


def _compared(
    clean: Curve, goal: float, sides: Mapping[str, tuple[dict[str, Any], Curve]]
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Return figures and ratios. `sides`: replay.json and curve of the repaired run, by kind of broken reward."""
    total, to_goal = sum(clean.tokens), tokens_to(clean, goal)
    figures: dict[str, Any] = {"goal": round(goal, 4), "clean_tokens": total, "clean_tokens_to_goal": to_goal}
    ratio: dict[str, float | None] = {}
    for kind, (replayed, curve) in sides.items():
        new = tokens_to(curve, goal)
        figures[kind] = {
            "steps_rescored": replayed["steps_trained"],
            "refused": replayed["refused"],
            "reward_at_first": round(curve.reward[0], 4),
            "best_within_share": round(best_within(curve, int(SHARE * total)), 4),
            "new_tokens_to_goal": new,
        }
        ratio[f"{kind}_new_over_clean_tokens"] = new and round(new / total, 4)
        ratio[f"{kind}_new_over_clean_tokens_to_goal"] = new and to_goal and round(new / to_goal, 4)
    return figures, ratio


def tokens_to(curve: Curve, goal: float) -> int | None:
    """Return the tokens of the steps until the smoothed reward first was `goal`; None if it never was."""
    rewards = list(enumerate(smoothed(curve.reward)))
    step = next((step for step, reward in rewards[WINDOW - 1 :] if reward >= goal), None)
    return None if step is None else sum(curve.tokens[: step + 1])


def best_within(curve: Curve, tokens: int) -> float:
    """Return the greatest smoothed reward among the first steps that sampled at most `tokens` tokens in total."""
    steps = list(zip(smoothed(curve.reward), accumulate(curve.tokens), strict=True))[WINDOW - 1 :]
    return max((reward for reward, spent in steps if spent <= tokens), default=0.0)


def _repaired(folder: Path, kind: str, steps: int, groups: int) -> tuple[dict[str, Any], Curve]:
    """Return replay.json of the rescored run, and the curve of the run from its model."""
    reward = f"agent.reward=benchmarks.support.broken_rewards.{kind}"
    _run(folder, CALCULATOR, kind, _broken(steps), f"groups_per_step={groups}", reward)
    out, repaired = folder / f"{kind}-rescored", "recipes/calculator/reward.py:compute_score"
    run_command("rescore", folder, "rescore", str(folder / kind), "--reward", repaired, "--out", str(out))
    further = max(1, round(SHARE * steps))
    curve = _run(folder, str(out), f"{kind}-repaired", further, f"model={out / 'final_model'}")
    return json.loads((out / "replay.json").read_text()), curve


def _broken(steps: int) -> int:
    return max(1, 3 * steps // 5)


def _run(folder: Path, recipe: str, name: str, steps: int, *settings: str) -> Curve:
    place: Sequence[str] = (f"name={name}", f"runs_dir={folder}", f"trainer.steps={steps}", "data.eval=null")
    run_command("rescore", folder, "run", recipe, *place, *settings)
    return Curve.of(last_by(read_jsonl(folder / name / "metrics.jsonl"), "step"))
