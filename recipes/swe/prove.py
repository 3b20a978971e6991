"""Prove tasks without a model: the oracle must earn 1 on every one of them, the null policy 0.

    python recipes/swe/prove.py data/swe/train.parquet --repositories data/swe
    python recipes/swe/prove.py data/swe/train.parquet --repositories data/swe --backend docker --limit 5

Each policy plays whole episodes: recipes/swe/agent.py, the tools, a box, grading in further boxes. Status 1 where one
of them earns anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies import Says, null, oracle

from penstock.sandbox import SandboxConfig
from penstock.testing import try_loop
from penstock.tools import ToolConfig
from penstock.trainer import DatasetRow, load_rows
from penstock.transfer_queue import Task, Trajectory

HERE = Path(__file__).parent
MODEL = str(HERE.parent / "calculator" / "model")
"""Only its tokenizer is used."""
POLICIES: Mapping[str, tuple[Callable[[Mapping[str, Any]], Says], float]] = {
    "oracle": (oracle, 1.0),
    "null": (null, 0.0),
}
"""Name → policy and the reward that it must earn."""


@dataclass(frozen=True)
class World:
    """Sandbox, repositories and model of the episodes."""

    sandbox: SandboxConfig
    repositories: Path
    model: str = MODEL


async def play(row: DatasetRow, policy: str, world: World) -> Trajectory:
    """One episode of a task. Raises `InfraFailure` where the task or the box is broken."""
    name = str(row.extra_info["instance_id"])
    tools = [ToolConfig(name="swe", timeout_s=60, settings={"repositories": str(world.repositories)})]
    task: Task = row.task(f"eval/0/{policy}-{name}", "eval/0")
    return await try_loop(
        f"{HERE / 'agent.py'}:MiniSweAgent",
        task,
        model=world.model,
        says=POLICIES[policy][0](row.extra_info),
        tools=tools,
        sandbox=world.sandbox,
        max_turns=64,
        max_new_tokens=200_000,
        max_response_tokens=1_000_000,
        episode_deadline_s=1800.0,
        reward="penstock.tools.swe:tool_reward",
    )


async def prove(rows: list[DatasetRow], world: World) -> list[str]:
    """A line per episode that earned something else than it should."""
    wrong = []
    for policy, (_, expected) in POLICIES.items():
        earned = [(await play(row, policy, world)).reward for row in rows]
        right = sum(one == expected for one in earned)
        print(f"{policy}: {right} of {len(rows)} earned {expected:g}", flush=True)
        wrong += [
            f"{policy} earned {one} on {row.extra_info['instance_id']}"
            for one, row in zip(earned, rows, strict=True)
            if one != expected
        ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, help="SPLIT.parquet as `penstock data swe-…` writes it")
    parser.add_argument("--repositories", type=Path, default=Path(), help="what paths in rows are relative to")
    parser.add_argument("--backend", choices=["bwrap", "docker"], default="bwrap")
    parser.add_argument("--image", default="penstock-box:base", help="backend docker: of rows without one")
    parser.add_argument("--limit", type=int, default=0, help="the first tasks only; 0: all")
    options = parser.parse_args()
    limits = {"memory_mb": 1024, "tmp_mb": 256, "cpu_s": 600, "pids": 256, "run_timeout_s": 60.0, "max_boxes": 2}
    sandbox = SandboxConfig.model_validate({"backend": options.backend, "image": options.image, **limits})
    wrong = asyncio.run(prove(load_rows(options.tasks, options.limit), World(sandbox, options.repositories)))
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
