import pytest

from penstock.trainer import TrainerConfig, learning_rate


def rates(**settings: object) -> list[float]:
    config = TrainerConfig.model_validate({"lr": 1.0, "steps": 5, **settings})
    return [learning_rate(config, step) for step in range(config.steps)]


def test_constant() -> None:
    assert rates() == [1.0] * 5


def test_warm_up_reaches_the_full_rate_at_its_last_step() -> None:
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_ends_at_the_floor() -> None:
    assert rates(lr_schedule="linear", lr_floor=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_both_multiply() -> None:
    assert rates(lr_schedule="linear", lr_floor=0.2, warmup_steps=2)[:2] == pytest.approx([0.5, 0.8])


def test_one_step_has_the_full_rate() -> None:
    assert rates(steps=1, lr_schedule="linear", lr_floor=0.1) == [1.0]
