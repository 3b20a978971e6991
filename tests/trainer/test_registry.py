"""Algorithms are found by name, or by dotted path; a typo is answered with the nearest name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.losses import LOSSES
from penstock.trainer.registry import UnknownName

pytestmark = pytest.mark.torch


def test_names_and_dotted_paths() -> None:
    assert ADVANTAGES.names() == ["grpo"]
    assert ADVANTAGES.get("penstock.trainer.advantages.grpo:grpo") is ADVANTAGES.get("grpo")


def test_a_typo_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown policy loss 'decoupled-ppo'; did you mean 'decoupled_ppo'\?"):
        LOSSES.get("decoupled-ppo")
