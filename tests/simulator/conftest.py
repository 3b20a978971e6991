"""Small clusters whose times can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.simulator import Simulation
from penstock.simulator.config import LogNormal, Rollout, Trainer, Work


def cluster(**changes: Any) -> Simulation:
    """Two groups of two episodes per step, 10 tokens each, one server that decodes a token a second whatever its load,
    a trainer of 4 tokens a second: rollout takes 10 s, training 10 s."""
    parts: dict[str, Any] = {
        "max_staleness": 0,
        "group_size": 2,
        "groups_per_step": 2,
        "work": Work(prompt_tokens=0, response=LogNormal(median=10, sigma=0)),
        "rollout": Rollout(token_s=1.0),
        "trainer": Trainer(tokens_per_s=4.0),
        "steps": 6,
        "warmup": 2,
    }
    return Simulation.model_validate({**parts, **changes})


@pytest.fixture
def noisy() -> Simulation:
    """Long tails, tools, several servers and ranks: nothing is equal."""
    return cluster(
        group_size=4,
        groups_per_step=6,
        max_staleness=2,
        work=Work(
            prompt_tokens=20,
            response=LogNormal(median=60, sigma=1.0, longest=800),
            turns=2.5,
            tool_s=LogNormal(median=3, sigma=1.0, longest=40),
            observation_tokens=5,
        ),
        rollout=Rollout(servers=3, concurrent=8, token_s=0.02, token_s_per_sequence=0.004, in_flight=40),
        trainer=Trainer(ranks=2, tokens_per_s=150, updates=3, update_fixed_s=0.3),
        steps=14,
        warmup=4,
    )
