"""A setting of verl in a recipe or an override is answered with the key here, a misspelt one with the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.deploy import ConfigError, app, load_config

RECIPE = Path(__file__).parents[3] / "recipes/calculator.yaml"


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("trainer.save_freq=5", "verl's trainer.save_freq is trainer.checkpoint_every here"),
        ("trainer.test_freq=5", "verl's trainer.test_freq is trainer.eval_every here"),
        ("trainer.logger=wandb", "verl's trainer.logger is trainer.sinks here"),
        ("rollout.n=8", "verl's rollout.n is group_size here"),
        ("algorithm.adv_estimator=grpo", "verl's algorithm.adv_estimator is trainer.advantage here"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "verl's actor_rollout_ref.actor.optim.lr is trainer.lr here"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "is rollout.vllm_args.seed here"),
        ("trainer.resume_mode=auto", "a setting of verl: `penstock config from-verl`"),
        (
            "actor_rollout_ref={actor: {clip_ratio: 1, entropy_coeff: 0}}",
            "a setting of verl: `penstock config from-verl`",
        ),
        ("trainer.lrate=1", "did you mean 'trainer.lr'?"),
        ("trainer.leraning_rate=1", "did you mean 'trainer.lr'?"),
        ("trainer.save_trajectoris=1", "did you mean 'trainer.save_trajectories'?"),
        ("data.no_such=1", "valid keys here are"),
    ],
)
def test_an_unknown_setting_is_answered_with_ours(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(RECIPE, [override])
    assert answer in str(error.value)


def test_settings_can_be_looked_up() -> None:
    shown = CliRunner().invoke(app, ["config", "keys", "trainer.lr"]).stdout
    assert "trainer.lr  (default 1e-06)\n" in shown
    assert "trainer.lr_schedule  (default" in shown
    assert "model  (required)" in CliRunner().invoke(app, ["config", "keys"]).stdout
    refused = CliRunner().invoke(app, ["config", "keys", "trainer.rl"])
    assert (refused.exit_code, "no setting has 'trainer.rl' in its key" in refused.stderr) == (2, True)
