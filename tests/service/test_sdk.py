"""Tinker's own SDK against `penstock serve`, as users start it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import NAME, SDK, Served, serving

pytestmark = [
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (SDK / "complete").exists(), reason="the SDK is missing: scripts/setup-tinker installs it"),
]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A service that was just started."""
    with serving(tmp_path) as opened:
        yield opened


def test_every_call_of_the_sdk(served: Served) -> None:
    seen: dict[str, Any] = served.result(served.start("sdk_client.py"))
    assert any("train_unembed" in warning for warning in seen["warnings"])
    assert seen["models"] == [NAME]
    assert seen["losses"][0] > seen["losses"][1] > seen["losses"][2]
    assert all(isinstance(value, float) for value in seen["rl"].values())
    assert seen["custom"] > 0
    assert seen["computed"] == pytest.approx(seen["sampled"], abs=1e-4)
    assert seen["restored"][0] == seen["restored"][1]
    base, named, sampler = seen["versions"]
    assert named == sampler != base
    assert seen["refused"][0] == "UnprocessableEntityError"
    assert "loss_fn=importance_sampling" in seen["refused"][1]
    assert seen["failed"][0] == "RequestFailedError"
    assert "model_input" in seen["failed"][1]
    assert seen["runs"] == 2
    assert seen["checkpoints"] == ["sampler_weights/named", "weights/first"]


KILLS = 100
"""The most of them: fewer where the clients end before."""


RANKS = ("4", "8", "16")


@pytest.mark.deep
@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_whatever_is_killed_each_adapter_has_the_numbers_that_it_has_alone(tmp_path: Path) -> None:
    """Two clients train three adapters each, at the same time, while API, trainer and Redis are killed. Losses are
    those of one adapter after the other in a service that nothing disturbs, bit for bit."""
    source = random.Random(7)
    with serving(tmp_path / "killed") as served:
        clients = [served.start("sdk_training.py", str(seed), *RANKS) for seed in (1, 2)]
        for number in range(KILLS):
            time.sleep(source.uniform(0.3, 3.0))
            if all(client.poll() is not None for client in clients):
                break
            served.kill(("service-trainer", "service-api", "redis-server")[number % 3])
            print(f"kill {number + 1}")
        together = [served.result(client) for client in clients]
    with serving(tmp_path / "alone") as served:
        for seed, losses in enumerate(together, 1):
            for rank in RANKS:
                assert served.result(served.start("sdk_training.py", str(seed), rank)) == {rank: losses[rank]}
