"""GRPO's advantages by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from trainer_support import episodes

from penstock.trainer.advantages import ADVANTAGES

pytestmark = pytest.mark.torch


def grpo(rewards: list[float], group: list[int]) -> list[float]:
    return ADVANTAGES.get("grpo")(episodes(rewards, group)).tokens.tolist()


def test_a_group_of_two_and_one_of_four_by_hand() -> None:
    # group 0: mean 0.5, std √0.5; group 7: mean 0.25, std √((0.75² + 3 · 0.25²) / 3) = 0.5
    found = grpo([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0, 7, 0, 7, 7, 7])
    assert found == pytest.approx([0.70710678, 1.5, -0.70710678, -0.5, -0.5, -0.5], abs=4e-6)


def test_equal_rewards_and_single_members_say_nothing() -> None:
    assert grpo([0.1] * 10 + [1.0], [0] * 10 + [1]) == [0.0] * 11


def test_order_and_scale_do_not_matter() -> None:
    forward = grpo([0.0, 1.0, 3.0], [0, 0, 0])
    backward = grpo([300.0, 100.0, 0.0], [0, 0, 0])
    assert forward == pytest.approx(backward[::-1], abs=1e-5)
