"""Every YAML of the recipe loads and fits together, from a laptop to 64 GPUs and more."""

from __future__ import annotations

import pytest
import yaml
from tests.recipes.swe.conftest import RECIPE, penstock

from penstock.deploy import load_config, load_sandbox
from penstock.tools import SweSettings

pytestmark = pytest.mark.recipes
NAMES = ("cpu", "learn", "gpu1", "gpu8", "gpu64")


def test_dry_run_prints_the_whole_recipe(tmp_path):
    done = penstock("run", RECIPE / "cpu.yaml", "--dry-run", cwd=tmp_path)
    assert "\ndata: " in done.stderr, "its tasks are made first: a start would be refused"
    assert done.returncode == 2
    config = yaml.safe_load(done.stdout)
    assert config["agent"]["loop"] == f"{RECIPE / 'agent.py'}:MiniSweAgent"
    assert config["max_staleness"] == 2, "fully asynchronous"
    assert "groups of" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_its_parts_fit_together(name):
    config = load_config(RECIPE / f"{name}.yaml")
    (tools,) = config.tools
    settings = SweSettings(**tools.settings)
    assert tools.timeout_s <= config.sandbox.run_timeout_s
    assert settings.test_timeout_s <= settings.tests_timeout_s
    agent, rollout = config.agent, config.rollout
    assert agent.max_new_tokens <= agent.max_response_tokens < rollout.max_model_len, "and room for the prompt"
    assert config.trainer.micro_batch_tokens >= rollout.max_model_len, "the longest row fits into a pack"
    assert agent.episode_deadline_s <= config.trainer.batch_timeout_s
    assert config.trainer.ranks % config.trainer.parallel.layout.ranks == 0
    assert agent.workers * agent.concurrency <= config.sandbox.max_boxes or config.sandbox.max_boxes >= 32


def test_the_boxes_of_64_gpus_are_those_of_their_servers():
    sandbox = load_sandbox(RECIPE / "sandbox.yaml")
    run = load_config(RECIPE / "gpu64.yaml").sandbox
    assert (sandbox.memory_mb, sandbox.tmp_mb, sandbox.run_timeout_s) == (run.memory_mb, run.tmp_mb, run.run_timeout_s)
