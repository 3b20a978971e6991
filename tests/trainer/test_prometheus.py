"""The trainer's numbers as Prometheus sees them."""

from __future__ import annotations

from penstock.trainer import TrainerMetrics


def test_newest_numbers_and_sums_over_steps() -> None:
    metrics = TrainerMetrics()
    metrics.rewind(4)
    value = metrics.registry.get_sample_value
    assert value("penstock_trainer_policy_version") == 4
    times = {"wall_s": 2.0, "wait_s": 0.5, "train_s": 1.5}
    metrics.step(5, {"step": 4, "reward": 0.25, "tokens": 100, "episodes": 8, "staleness_tokens": {"1": 7}, **times})
    metrics.step(6, {"step": 5, "reward": 0.75, "tokens": 50, "episodes": 8, **times})
    metrics.evaluation(5, {"eval/reward": 0.5})
    assert value("penstock_trainer_policy_version") == 6
    assert value("penstock_trainer_steps_total") == 2
    assert value("penstock_trainer_tokens_total") == 150
    assert value("penstock_trainer_episodes_total") == 16
    assert value("penstock_trainer_step_seconds_sum") == 4.0
    assert value("penstock_trainer_phase_seconds_total", {"phase": "wait"}) == 1.0
    assert value("penstock_trainer_metric", {"name": "reward"}) == 0.75
    assert value("penstock_trainer_metric", {"name": "staleness_tokens/1"}) == 7
    assert value("penstock_trainer_metric", {"name": "eval/reward"}) == 0.5
