from pathlib import Path

import pytest
import yaml

from penstock.deploy import ConfigError, dump_config, load_config, parse_config
from penstock.deploy.commands.shared import own_or_shipped
from penstock.deploy.recipe_tree import RECIPES
from penstock.deploy.removed_settings import ELSEWHERE, SINCE_0_2

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


@pytest.mark.parametrize("name", ["2026-12-01", "20261201", "1e5", "'1e5'", "nan", "true"])
def test_load_config_override_of_a_text_is_what_was_typed(recipe: Path, name: str) -> None:
    assert load_config(recipe, [f"name={name}"]).name == name.strip("'")
    assert load_config(recipe, [f"data.eval={name}", "data.eval=null"]).data.eval is None


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
        (
            "agent.parser=hermez",
            ["override 'agent.parser=hermez': agent.parser: ", "'auto', 'hermes'", "Format of the"],
        ),
        ("max_staleness=asynch", ["must be sync, one_step_off, fully_async or a number"]),
        ("max_staleness=true", ["must be sync, one_step_off, fully_async or a number"]),
        ("tools=absent.yaml", ["absent.yaml: no YAML file with a list of tools"]),
        ("group_size=0", ["group_size:", "greater than or equal to 1", "Episodes per task"]),
        ("trainer", ["override 'trainer'", "section.key=value"]),
        ("trainer.lr=[1", ["override 'trainer.lr=[1'", "not valid YAML", "expected ',' or ']'"]),
        ("trainer.learning_rate=1", ["trainer.learning_rate: no such key; did you mean 'trainer.lr'?"]),
        ("batch_size=1", ["batch_size: no such key; did you mean 'groups_per_step'?"]),
        ("trainer.zzz=1", ["trainer.zzz: no such key; valid keys here are, the nearest first, "]),
        ("transfer_queue.url=http://x", ["transfer_queue.url: ", "redis://, rediss:// or unix://"]),
        ("lr=1", ["override 'lr=1': lr: no such key; did you mean 'trainer.lr'?"]),
        ("traner.lr=1", ["override 'traner.lr=1': traner: no such key; did you mean 'trainer'?"]),
        ("trainer.lr={a", ["while parsing a flow mapping: expected", "; close its bracket"]),
        ("trainer.lr=a: b: c", ["; quote text as"]),
        ("model.name=x", ["'model' is a value, not a section"]),
        ("name=../evil", ["name:", "Names runs/NAME"]),
    ],
)
def test_mistakes_name_the_key_and_the_mend(recipe: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [override])
    for word in words:
        assert word in str(caught.value)


def test_a_mistake_of_an_override_is_not_the_files(recipe: Path) -> None:
    with pytest.raises(ConfigError) as of_override:
        load_config(recipe, ["trainer.lrr=1", "trainer.lr=2"])
    assert str(of_override.value).startswith("override 'trainer.lrr=1': trainer.lrr: no such key")
    recipe.write_text(recipe.read_text() + "groups: 3\n")
    with pytest.raises(ConfigError) as of_both:
        load_config(recipe, ["trainer.lrr=1"])
    head, *lines = str(of_both.value).splitlines()
    assert head == f"{recipe}: 2 problems"
    assert sorted(line.split(": ")[0].strip() for line in lines) == ["groups", "override 'trainer.lrr=1'"]


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ("[python, My_tool.py:Guess]", ["python", "My_tool.py:Guess"]),
        ("My_tool.py:Guess", ["My_tool.py:Guess"]),
        ("{name: python}", ["python"]),
        ("", []),
    ],
)
def test_tools_may_be_names_alone(recipe: Path, tools: str, names: list[str]) -> None:
    (recipe.parent / "My_tool.py").write_text("")
    config = load_config(recipe, [f"tools={tools}"])
    assert [tool.name for tool in config.tools] == [
        f"{recipe.parent.resolve()}/{name}" if ".py:" in name else name for name in names
    ]


@pytest.mark.parametrize("key", SINCE_0_2)
def test_removed_settings_say_since_when_and_what_to_do(recipe: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [f"{key}=1"])
    assert f"{key}: was removed in Penstock 0.2.0: {SINCE_0_2[key]}" in str(caught.value)


@pytest.mark.parametrize("key", [*ELSEWHERE.values()])
def test_keys_of_other_frameworks_lead_to_keys_that_are_there(recipe: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [f"{key}={{no: value}}"])
    assert "no such key" not in str(caught.value)


def test_an_empty_text_is_a_value(recipe: Path) -> None:
    config = load_config(recipe, ["agent.reward=", "data.eval="])
    assert (config.agent.reward, config.data.eval) == ("", None)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"model: is required\. Model folder or hub name"):
        load_config(tmp_path / "empty.yaml")
    with pytest.raises(ConfigError, match="no such recipe file; `penstock recipes`"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"no such recipe file; did you mean 'empty\.yaml'"):
        load_config(tmp_path / "emty.yaml")
    with pytest.raises(ConfigError, match="a folder, and not a run's"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"no such recipe file; did you mean 'calculator.yaml'\?"):
        load_config(Path("recipes/calculater.yaml"))


def test_a_shipped_recipe_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, and files of `recipes/` in overrides; a file of that name in the current folder comes first."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes/search_r1/cpu.yaml", "search_r1/cpu.yaml"):
        assert own_or_shipped(Path(name)) == RECIPES / "search_r1/cpu.yaml"
    config = load_config(RECIPES / "calculator.yaml", ["agent.loop=recipes/own_loop/agent.py:MyAgent"])
    assert config.agent.loop == f"{(RECIPES / 'own_loop/agent.py').resolve()}:MyAgent"
    assert own_or_shipped(Path("recipes/none.yaml")) == Path("recipes/none.yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/calculator.yaml").write_text(RECIPE)
    assert own_or_shipped(Path("recipes/calculator.yaml")) == Path("recipes/calculator.yaml")


def test_all_problems_are_named_at_once(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.wokers.*\n.*trainer\.lrr"):
        load_config(recipe, ["trainer.lrr=1", "agent.wokers=3"])


PATHS = """
model: model
data: {train: generate:calculator:8, eval: eval.jsonl}
agent:
  reward: by_data_source
  loop: gymnasium
  settings: {env: rooms.py:room}
  rewards: {sources: {a: own.py:f, b: {name: own.py:g}, c: gsm8k, d: code}}
  sources: {sums: {loop: rooms.py:Loop}}
tools: [{name: own.py:convert, timeout_s: 3}, {name: python}]
sft: {messages: [one.jsonl, two.jsonl], runs: one.jsonl}
"""


def test_paths_are_resolved_and_names_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name of a reward or loop does not make it a path."""
    for folder in ("model", "code", "gymnasium", "elsewhere"):
        (tmp_path / folder).mkdir()
    for name in ("own.py", "rooms.py", "one.jsonl", "two.jsonl", "eval.jsonl", "elsewhere/own.py"):
        (tmp_path / name).touch()
    (tmp_path / "recipe.yaml").write_text(PATHS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(tmp_path / "recipe.yaml")
    assert (config.model, config.data.train) == (f"{tmp_path}/model", "generate:calculator:8")
    assert config.data.eval == f"{tmp_path}/eval.jsonl"
    assert config.agent.loop == "gymnasium"
    assert config.agent.settings["env"] == f"{tmp_path}/rooms.py:room"
    assert config.agent.sources["sums"].loop == f"{tmp_path}/rooms.py:Loop"
    rewards = {name: getattr(choice, "name", choice) for name, choice in config.agent.rewards.sources.items()}
    assert rewards == {"a": f"{tmp_path}/own.py:f", "b": f"{tmp_path}/own.py:g", "c": "gsm8k", "d": "code"}
    assert [tool.name for tool in config.tools] == [f"{tmp_path}/own.py:convert", "python"]
    assert config.sft.messages == (f"{tmp_path}/one.jsonl", f"{tmp_path}/two.jsonl")
    assert config.sft.runs == (f"{tmp_path}/one.jsonl",)
    override = load_config(
        tmp_path / "recipe.yaml", ["agent.reward=own.py:f", "agent.rewards.sources={}", "agent.loop=rooms.py:Loop"]
    )
    assert override.agent.reward == f"{tmp_path}/elsewhere/own.py:f", "the current directory goes first"
    assert override.agent.loop == f"{tmp_path}/rooms.py:Loop"
    assert parse_config(yaml.safe_load(dump_config(config)), source="dump") == config


def test_tools_may_be_in_a_file_next_to_the_recipe(recipe: Path) -> None:
    recipe.with_name("my_tools.yaml").write_text("tools: [{name: python}, {class_name: my.Tool, config: {size: 3}}]")
    recipe.write_text(RECIPE + "tools: my_tools.yaml\n")
    config = load_config(recipe)
    assert [(tool.name, tool.settings) for tool in config.tools] == [("python", {}), ("my.Tool", {"size": 3})]
    with pytest.raises(ConfigError, match=r"(?i)nowhere.yaml: no YAML file with a list of tools"):
        load_config(recipe, ["tools=nowhere.yaml"])


TOOL = """
from penstock.tools import function_tool

@function_tool
def convert(euros: float) -> str:
    \"\"\"Convert euros to dollars.\"\"\"
    return f"{1.1 * euros:.2f}"
"""


def test_tools_in_files_are_opened_by_their_names(recipe: Path) -> None:
    from penstock.agent_loops import LoadError
    from penstock.deploy.preflight.agent import opened_tools

    recipe.write_text(RECIPE + "tools: [{name: 'money.py:convert', timeout_s: 3}]\n")
    with pytest.raises(LoadError, match=r"no file 'money\.py'"), opened_tools(load_config(recipe)):
        pass
    (recipe.parent / "money.py").write_text(TOOL)
    with opened_tools(load_config(recipe)) as tools:
        assert list(tools) == ["convert"]


def test_broken_yaml_is_one_line_with_its_place(recipe: Path) -> None:
    recipe.write_text("seed: 1\nmodel: [x\n")
    with pytest.raises(ConfigError) as refused:
        load_config(recipe)
    assert str(refused.value) == (
        f"{recipe}, line 3, column 1: not valid YAML: while parsing a flow sequence: expected ',' or ']', but got "
        "'<stream end>'"
    )
