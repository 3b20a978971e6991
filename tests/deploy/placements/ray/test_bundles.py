"""What a role reserves, and which recipes cannot work on several machines."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.deploy import ConfigError, RunConfig
from penstock.deploy.placements.ray.cluster import bundle_of, check_machines, environment_of
from penstock.deploy.placements.ray.registry import parse_counts
from penstock.trainer import CORES_VARIABLE


def recipe(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "m", "data": {"train": "t"}, **sections})


USUAL = {"trainer": {"ranks": 4, "threads": 2}}
OWN = {"ray": {"rollout": {"GPU": 8, "CPU": 16, "h100": 0.01}, "agent": {"CPU": 0.5}, "trainer": {"GPU": 0}}}


@pytest.mark.parametrize(
    ("sections", "kind", "gpus", "bundle"),
    [
        (USUAL, "rollout", True, {"CPU": 1, "GPU": 1}),
        (USUAL, "rollout", False, {"CPU": 1}),
        (USUAL, "agent", True, {"CPU": 1}),
        (USUAL, "trainer", True, {"CPU": 8, "GPU": 4}),
        (OWN, "rollout", True, {"CPU": 16, "GPU": 8, "h100": 0.01}),
        (OWN, "agent", True, {"CPU": 0.5}),
        (OWN, "trainer", True, {"CPU": 1}),
    ],
)
def test_what_a_role_reserves(sections: dict[str, Any], kind: Any, gpus: bool, bundle: dict[str, float]) -> None:
    assert bundle_of(kind, recipe(**sections), gpus=gpus) == bundle


def test_the_trainers_ranks_know_how_many_cores_are_theirs() -> None:
    config = recipe(trainer={"ranks": 4, "offload": True})
    assert environment_of("trainer", bundle_of("trainer", config, gpus=True)) == {CORES_VARIABLE: "4"}
    assert environment_of("trainer", {"CPU": 64, "GPU": 8}) == {CORES_VARIABLE: "64"}
    for less in ({"CPU": 0.5}, {"GPU": 1.0}):
        assert environment_of("trainer", less) == {CORES_VARIABLE: "1"}
    assert environment_of("rollout", {"CPU": 8}) == environment_of("agent", {"CPU": 8}) == {}


def test_check_machines_names_every_missing_override() -> None:
    config = recipe(sandbox={"backend": "remote", "url": "http://localhost:8700"})
    check_machines(config, 1)
    with pytest.raises(ConfigError) as refused:
        check_machines(config, 2)
    named = [line.split("=")[0].strip() for line in str(refused.value).splitlines()[1:]]
    assert named == [
        "transfer_queue.url", "rollout.host", "rollout.weight_transport", "rollout.weights_host", "sandbox.url",
    ]  # fmt: skip
    for host in ("127.0.0.2", "localhost", "[::1]"):
        with pytest.raises(ConfigError, match=r"transfer_queue\.url"):
            check_machines(recipe(transfer_queue={"url": f"redis://{host}:6379"}), 2)


@pytest.mark.parametrize("transport", ["http", "disk"])
def test_a_recipe_for_several_machines_passes(transport: str) -> None:
    rollout = {"host": "0.0.0.0", "weight_transport": transport}
    if transport == "http":
        rollout["weights_host"] = "0.0.0.0"
    check_machines(recipe(rollout=rollout, transfer_queue={"url": "redis://queue:6379"}), 8)


def test_counts_are_read_and_mistakes_are_named() -> None:
    assert parse_counts(["rollout=4", "agent=0"]) == {"rollout": 4, "agent": 0}
    for word in ("trainer=2", "rollout", "agent=-1", "agent=many"):
        with pytest.raises(ConfigError, match=word):
            parse_counts([word])
