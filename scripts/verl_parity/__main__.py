"""Runs every comparison on several seeds, and says the largest difference of each."""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version

logging.disable(logging.WARNING)

from verl_parity import advantages, corrections, losses  # noqa: E402

SEEDS = range(5)
GOAL = 1e-6


def compare() -> dict[str, float]:
    """case → largest difference over all seeds"""
    worst: dict[str, float] = {}
    for seed in SEEDS:
        for part in (advantages, losses, corrections):
            for name, found in part.cases(seed).items():
                worst[name] = max(worst.get(name, 0.0), found)
    return worst


def main() -> int:
    worst = compare()
    if "--json" in sys.argv:
        print(json.dumps({"verl": version("verl"), "goal": GOAL, "largest_difference": worst}))
    else:
        print(f"beside verl {version('verl')}, {len(SEEDS)} seeds")
        for name, found in worst.items():
            print(f"{name:32} {found:.1e}{'' if found <= GOAL else '   TOO LARGE'}")
    # Not `max(…) > GOAL`: a NaN is no success.
    return 0 if all(found <= GOAL for found in worst.values()) else 1


sys.exit(main())
