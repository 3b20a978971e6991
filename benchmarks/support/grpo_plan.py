"""The seam between `penstock bench compare` and its TRL program: one schedule, read from the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

WINDOW = 3
"""Steps in a row over which the mean reward must be the goal."""


def goal_reached(rewards: Sequence[float], goal: float) -> bool:
    """Whether the mean of the last `WINDOW` steps is the goal."""
    return len(rewards) >= WINDOW and mean(rewards[-WINDOW:]) >= goal


@dataclass(frozen=True)
class GrpoPlan:
    """What both programs do alike."""

    model: str
    """Folder"""
    seed: int
    rows: str
    """JSON lines: `prompt` (messages), `prompt_ids` (what Penstock's model reads), `ground_truth`, `data_source`"""
    groups: int
    """Per step"""
    group_size: int
    learning_rates: tuple[float, ...]
    """[S] of each step; S: most steps"""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    temperature: float
    top_p: float
    top_k: int
    """0: all tokens"""
    max_turns: int
    max_new_tokens: int
    """Per turn"""
    max_response_tokens: int
    """Per episode, tool results included"""
    goal: float
    """Mean reward at which a program ends"""

    @property
    def episodes(self) -> int:
        """Per step"""
        return self.groups * self.group_size

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> GrpoPlan:
        fields = json.loads(text)
        tuples = {name: tuple(fields[name]) for name in ("learning_rates", "betas")}
        return cls(**{**fields, **tuples})


@dataclass(frozen=True)
class TrlJob:
    """What the TRL program gets as its one argument."""

    plan: GrpoPlan
    reward: str
    """File of the recipe's `compute_score`"""
    threads: int
    """Threads of torch"""
    tool: dict[str, Any] | None
    """The `python` tool's schema, as the prompt shows it; None: the task has no tool"""
    command: tuple[str, ...] | None
    """Before the code; None: the tool computes in the trainer's process"""
    tool_timeout_s: float
    micro_rows: int
    """Rows of one forward and backward"""
    log: str
    """JSON lines, one per step"""

    def dump(self) -> str:
        return json.dumps({**asdict(self), "plan": self.plan.dump()})

    @classmethod
    def read(cls, text: str) -> TrlJob:
        fields = json.loads(text)
        command = None if fields["command"] is None else tuple(fields["command"])
        return cls(**{**fields, "plan": GrpoPlan.read(fields["plan"]), "command": command})


@dataclass(frozen=True)
class GrpoStep:
    """One optimizer step, as either program's log has it."""

    wall_s: float
    """Since the program was started"""
    reward: float
    """Mean over the episodes"""
    episodes: int
    sampled_tokens: int
    lr: float


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
