"""Algorithms are found by name, or by dotted path; a typo is answered with the nearest name."""

from __future__ import annotations

from inspect import Parameter
from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.common import BadOptions, Registry, UnknownName, options_of
from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.corrections import CORRECTIONS
from penstock.trainer.filters import FILTERS
from penstock.trainer.losses import LOSSES

pytestmark = pytest.mark.torch


def test_names_and_dotted_paths() -> None:
    assert {"grpo", "rloo", "gae"} <= set(ADVANTAGES.names())
    assert ADVANTAGES.get("penstock.trainer.advantages.grpo:grpo") is ADVANTAGES.get("grpo")


def test_a_typo_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown policy loss 'decoupled-ppo'; did you mean 'decoupled_ppo'\?"):
        LOSSES.get("decoupled-ppo")


def test_settings_are_the_functions_own() -> None:
    assert options_of(ADVANTAGES.get("gigpo")) == {"gamma": 0.95, "weight": 1.0, "norm": "std"}
    with pytest.raises(BadOptions, match=r"advantage estimator 'gigpo' has no setting 'gama'; did you mean 'gamma'"):
        ADVANTAGES.bind("gigpo", {"gama": 0.9})
    with pytest.raises(BadOptions, match=r"policy loss 'ppo': setting dual_clip is 0.5: .*greater than 1"):
        LOSSES.bind("ppo", {"dual_clip": 0.5})
    with pytest.raises(BadOptions, match=r"setting norm is 'variance'"):
        ADVANTAGES.bind("gigpo", {"norm": "variance"})


@pytest.mark.parametrize("registry", [ADVANTAGES, CORRECTIONS, FILTERS, LOSSES], ids=lambda registry: registry.kind)
def test_defaults_are_within_their_own_bounds(registry: Registry[Any]) -> None:
    for name in registry.names():
        defaults = options_of(registry.get(name))
        given = {option: default for option, default in defaults.items() if default is not Parameter.empty}
        registry.bind(name, given)
