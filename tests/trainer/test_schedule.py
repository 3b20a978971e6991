import pytest

from penstock.trainer import TrainerConfig, learning_rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 5),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"lr_schedule": "linear", "lr_floor": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "linear", "lr_floor": 0.2, "warmup_steps": 2}, [0.5, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "linear", "lr_floor": 0.1, "steps": 1}, [1.0]),
    ],
)
def test_rates_of_a_schedule(settings: dict, expected: list[float]) -> None:
    config = TrainerConfig.model_validate({"lr": 1.0, "steps": 5, **settings})
    assert [learning_rate(config, step) for step in range(config.steps)] == pytest.approx(expected)
