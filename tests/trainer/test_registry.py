"""Algorithms are found by name, or by dotted path; a typo is answered with the nearest name."""

from __future__ import annotations

from inspect import Parameter
from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.common import Registry, options_of
from penstock.common.registry import BadOptions
from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.corrections import CORRECTIONS
from penstock.trainer.filters import FILTERS
from penstock.trainer.losses import LOSSES

pytestmark = pytest.mark.torch


def test_names_and_dotted_paths() -> None:
    assert {"grpo", "rloo", "gae"} <= set(ADVANTAGES.names())
    assert ADVANTAGES.get("penstock.trainer.advantages.grpo:grpo") is ADVANTAGES.get("grpo")


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


DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "advantage estimator": {
        "gae": {"gamma": 1.0, "lam": 1.0},
        "gigpo": {"gamma": 0.95, "weight": 1.0, "norm": "std"},
        "grpo": {"epsilon": 1e-6},
        "grpo_process": {"epsilon": 1e-6},
        "hgpo": {"gamma": 0.95, "history": 2, "alpha": 1.0},
        "prime": {"beta": 0.05, "gamma": 1.0},
        "reinforce_plus_plus": {"gamma": 1.0},
        "turn_gae": {"gamma": 1.0, "lam": 1.0},
        "vapo": {"gamma": 1.0, "alpha": 0.05},
    },
    "off-policy correction": {
        "icepop": {"low": 0.5, "high": 5.0, "level": "token"},
        "masked_is": {"cap": 2.0, "level": "sequence"},
        "rejection": {"low": 0.5, "high": 2.0, "level": "geometric"},
        "truncated_is": {"cap": 2.0, "level": "token"},
    },
    "episode filter": {"pf_ppo": {"mode": "pow", "power": 2.0}},
    "policy loss": {
        "cispo": {"clip_low": 1.0, "clip_high": 0.28},
        "clip_cov": {"clip_low": 0.2, "clip_high": 0.2, "share": 0.0002, "lower": 1.0, "upper": 5.0},
        "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.28},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
        "kl_cov": {"share": 0.0002, "kl_weight": 1.0},
        "ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
        "spin": {"lam": 0.1},
        "sppo": {"eta": 1.0},
    },
}
"""Of the papers, by registry and name; what is not named has no setting."""


@pytest.mark.parametrize("registry", [ADVANTAGES, CORRECTIONS, FILTERS, LOSSES], ids=lambda registry: registry.kind)
def test_defaults_are_those_of_the_papers(registry: Registry[Any]) -> None:
    found = {name: options for name in registry.names() if (options := options_of(registry.get(name)))}
    assert found == DEFAULTS[registry.kind]
