from pathlib import Path

import pytest
import yaml

from penstock.deploy import ConfigError, dump_config, load_config, parse_config
from penstock.deploy.removed_settings import SINCE_0_2

RECIPE = """
model: some-org/some-model
data: {train: rows.parquet}
trainer: {lr: 1e-6}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_load_config_override_values(recipe: Path) -> None:
    config = load_config(recipe, ["trainer.lr=3e-4", "max_staleness=one_step_off", "data.shuffle=false", "name=mine"])
    assert config.trainer.lr == 3e-4
    assert config.max_staleness == 1
    assert config.data.shuffle is False
    assert config.name == "mine"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lrr=1", ["trainer.lrr: no such key", "did you mean 'trainer.lr'?"]),
        ("rollout.engin=vllm", ["rollout.engin: no such key", "'rollout.engine'"]),
        ("max_stalenes=1", ["max_stalenes: no such key", "'max_staleness'"]),
        ("trainer.lr=fast", ["trainer.lr:", "valid number", "'fast'", "AdamW learning rate"]),
        ("rollout.weight_transport=collective", ["rollout.weight_transport:", "rollout.weight_transport=broadcast"]),
        ("rollout.broadcast_receive=in_place", ["rollout.broadcast_receive:", "rollout.weight_transport=broadcast"]),
        ("rollout.kv_offload_gb=8", ["rollout.kv_offload_gb:", "rollout.engine is hf"]),
        ("rollout.engine=tpu", ["rollout.engine:", "'hf', 'vllm', 'sglang' or 'served'"]),
        ("agent.parser=hermez", ["1 problem(s)", "  agent.parser: ", "'auto', 'hermes'", "Format of the model's"]),
        ("group_size=0", ["group_size:", "greater than or equal to 1", "Episodes per task"]),
        ("trainer", ["override 'trainer'", "section.key=value"]),
        ("model.name=x", ["'model' is a value, not a section"]),
        ("name=../evil", ["name:", "Names runs/NAME"]),
    ],
)
def test_mistakes_name_the_key_and_the_mend(recipe: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", SINCE_0_2)
def test_removed_settings_say_since_when_and_what_to_do(recipe: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [f"{key}=1"])
    assert f"{key}: was removed in Penstock 0.2.0: {SINCE_0_2[key]}" in str(caught.value)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="model: is required; Model folder or hub name"):
        load_config(tmp_path / "empty.yaml")
    with pytest.raises(ConfigError, match="no such recipe file"):
        load_config(tmp_path / "absent.yaml")


def test_all_problems_are_told_at_once(recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["trainer.lrr=1", "agent.wokers=3"])
    assert "2 problem(s)" in str(caught.value)


def test_load_config_resolves_paths_and_keeps_names(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "reward.py").write_text("")
    (tmp_path / "r.yaml").write_text(
        "model: model\ndata: {train: generate:calculator:8}\n"
        "agent: {reward: 'reward.py:compute_score', loop: tool_agent}\n"
    )
    config = load_config(tmp_path / "r.yaml")
    assert config.model == str(tmp_path / "model")
    assert config.agent.reward == f"{tmp_path / 'reward.py'}:compute_score"
    assert config.agent.loop == "tool_agent"
    assert config.data.train == "generate:calculator:8"


def test_the_dumped_tree_reads_back_as_the_same_config(recipe: Path) -> None:
    config = load_config(recipe, ["max_staleness=4"])
    assert parse_config(yaml.safe_load(dump_config(config)), source="dump") == config


def test_tools_may_lie_in_a_file_of_their_own_beside_the_recipe(recipe: Path) -> None:
    recipe.with_name("my_tools.yaml").write_text("tools: [{name: python}, {class_name: my.Tool, config: {size: 3}}]")
    recipe.write_text(RECIPE + "tools: my_tools.yaml\n")
    config = load_config(recipe)
    assert [(tool.name, tool.settings) for tool in config.tools] == [("python", {}), ("my.Tool", {"size": 3})]
    assert parse_config(yaml.safe_load(dump_config(config)), "dump") == config
    with pytest.raises(ConfigError, match=r"(?i)nowhere.yaml: no YAML file with a list of tools"):
        load_config(recipe, ["tools=nowhere.yaml"])


def test_files_of_rewards_are_found_and_names_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is called like a reward is none."""
    (tmp_path / "own.py").write_text("")
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    sources = {"a": "own.py:f", "b": {"name": "own.py:g"}, "c": "gsm8k", "d": "code"}
    tree = {"model": "m", "data": {"train": "t"}, "agent": {"reward": "code", "rewards": {"sources": sources}}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    agent = load_config(recipe).agent
    found = {name: getattr(choice, "name", choice) for name, choice in agent.rewards.sources.items()}
    assert agent.reward == "code"
    assert found == {"a": f"{tmp_path}/own.py:f", "b": f"{tmp_path}/own.py:g", "c": "gsm8k", "d": "code"}
    assert load_config(recipe, ["agent.reward=own.py:f"]).agent.reward == f"{tmp_path}/own.py:f"


TOOL = """
from penstock.tools import function_tool

@function_tool
def convert(euros: float) -> str:
    \"\"\"Convert euros to dollars.\"\"\"
    return f"{1.1 * euros:.2f}"
"""


def test_load_config_finds_tools_beside_the_recipe(recipe: Path, monkeypatch) -> None:
    from penstock.deploy.preflight.agent import opened_tools

    (recipe.parent / "money.py").write_text(TOOL)
    recipe.write_text(RECIPE + "tools: [{name: 'money.py:convert', timeout_s: 3}]\n")
    elsewhere = recipe.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(recipe)
    assert config.tools[0].name == f"{recipe.parent / 'money.py'}:convert"
    assert parse_config(yaml.safe_load(dump_config(config)), source="stored") == config
    with opened_tools(config) as tools:
        assert list(tools) == ["convert"]


def test_a_file_of_tools_that_is_not_there_is_named(recipe: Path) -> None:
    from penstock.agent_loops import LoadError
    from penstock.deploy.preflight.agent import opened_tools

    recipe.write_text(RECIPE + "tools: [{name: 'money.py:convert'}]\n")
    with pytest.raises(LoadError, match=r"no file 'money\.py'"), opened_tools(load_config(recipe)):
        pass


def test_load_config_resolves_loops_and_environments_in_files(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe.parent / "rooms.py").touch()
    (recipe.parent / "gymnasium").mkdir()
    monkeypatch.chdir(recipe.parent)
    config = load_config(recipe, ["agent.loop=gymnasium", "agent.settings.env=rooms.py:room"])
    assert (config.agent.loop, config.agent.settings["env"]) == ("gymnasium", f"{recipe.parent / 'rooms.py'}:room")
    assert load_config(recipe, ["agent.loop=rooms.py:Loop"]).agent.loop == f"{recipe.parent / 'rooms.py'}:Loop"
