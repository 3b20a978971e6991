"""A recipe that was made of verl's settings works: the same Parquet and tool file, the same reward function."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.datasets import write_parquet
from penstock.deploy import load_config, rehearse_recipe, rows_of
from penstock.deploy.migrate.convert import migrate
from penstock.deploy.migrate.source import read_source

MODEL = Path(__file__).parents[3] / "recipes/calculator/model"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(data_source == "sums" and solution_str.strip().endswith(ground_truth))
"""
TOOLS = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {type: native, num_workers: 4, default_timeout: 90}
    tool_schema:
      type: function
      function:
        name: code_interpreter
        description: Runs code.
        parameters: {type: object, properties: {code: {type: string}}, required: [code]}
"""
pytestmark = pytest.mark.bwrap


async def test_data_tools_and_reward_are_the_same(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {n}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n, "code": f"print({n}+1)"},
        }
        for n in (41, 98)
    ]
    write_parquet(rows, tmp_path / "train.parquet")
    (tmp_path / "score.py").write_text(REWARD)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    given = read_source(
        None,
        [
            f"data.train_files={tmp_path / 'train.parquet'}",
            "data.max_response_length=900",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.model.path={MODEL}",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
            f"custom_reward_function.path={tmp_path / 'score.py'}",
            "trainer.total_epochs=3",
        ],
    )
    migration = migrate(given)
    assert migration.account.unmapped == []
    (tmp_path / "recipe.yaml").write_text(migration.yaml())
    config = load_config(tmp_path / "recipe.yaml", ["sandbox.run_timeout_s=80", "agent.episode_deadline_s=250"])
    assert config.trainer.steps == 3, "two rows, three epochs, two prompts a step"

    def compute(snapshot):
        if snapshot.turn:
            return f"It is {snapshot.results[-1]}"
        return snapshot.call("code_interpreter", code=snapshot.task.extra_info["code"])

    found = await rehearse_recipe(config, compute, rows_of(config, "train"))
    assert (found.rewards, found.failures) == ([1.0, 1.0], [])
    idle = await rehearse_recipe(config, lambda snapshot: "I do not know", rows_of(config, "train"))
    assert idle.rewards == [0.0, 0.0]
