"""A recipe in one Python file: its parts, its settings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets import BadSpec, check_spec, materialise
from penstock.deploy import ConfigError, RunConfig, load_config
from penstock.deploy.recipe_tree import RECIPES

GAME = """
SETTINGS = {"model": "m", "agent": {"settings": {"action_pattern": "[0-9]"}}, "trainer.lr": 1e-3}
class Game:
    def reset(self, seed): ...
    def step(self, action): ...
"""
TOOLS = """
from penstock.agent_loops import register  # an imported name is not a part
from penstock.tools import function_tool
SETTINGS = {"model": "m", "tools": [{"name": "python"}], "data.train": "generate:calculator/train"}
TASKS = [("1+1?", "2")]
@function_tool
def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b
def compute_score(data_source, solution_str, ground_truth, extra_info): ...
"""
CLASSES = """
from penstock.tools import BaseTool, PythonTool, ToolGroup
SETTINGS = {"model": "m"}
TASKS = [("1+1?", "2")]
class Half(BaseTool): ...
class Dial(Half):
    async def execute(self, state, arguments): ...
    def reset(self): ...
class Locks(ToolGroup):
    def tools(self): ...
"""


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    """Each in a folder of its own: a process loads a file once."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    (folder / "my game.py").write_text(text)
    return load_config(folder / "my game.py", overrides)


def test_parts_are_defaults_of_their_keys(tmp_path: Path) -> None:
    config = load(tmp_path, GAME, "trainer.steps=7")
    assert (config.name, config.model, config.trainer.lr, config.trainer.steps) == ("my-game", "m", 1e-3, 7)
    assert config.agent.settings == {"env": f"{tmp_path}/0/my game.py:Game", "action_pattern": "[0-9]"}
    assert (config.agent.loop, config.data.train.partition("?")[0]) == ("gymnasium", "generate:seeds/train")
    config = load(tmp_path, TOOLS.replace('"tools": [{"name": "python"}], "data.train"', '"data.eval"'))
    file = f"{tmp_path}/1/my game.py"
    assert [tool.name for tool in config.tools] == [f"{file}:add"]
    assert (config.agent.reward, config.data.train) == (f"{file}:compute_score", f"{file}:TASKS")
    assert config.data.eval == "generate:calculator/train"
    config = load(tmp_path, TOOLS, "agent.reward=")
    assert ([tool.name for tool in config.tools], config.data.train) == (["python"], "generate:calculator/train")


def test_tool_classes_that_the_file_defines_are_tools(tmp_path: Path) -> None:
    config = load(tmp_path, CLASSES)
    assert [tool.name.rpartition(":")[2] for tool in config.tools] == ["Dial", "Locks"]
    config = load(tmp_path, CLASSES, "tools=[python]")
    assert [tool.name for tool in config.tools] == ["python"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Game: ...", "has no SETTINGS; write a dict such as"),
        ("SETTINGS = [1]", "SETTINGS is a list; write a dict such as"),
        (
            "SETTINGS = {'model': 'm'}\nclass Game:\n def reset(self, seed): ...",
            "class Game has reset(seed) and no step",
        ),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        (f"{GAME}\nclass Other(Game): ...", "Game and Other have reset and step; name one in SETTINGS"),
        ("SETTINGS = {'model': 'm'}", "data: no tasks; define a class with reset(seed) and step(action)"),
        ("SETTINGS = {'model': 'm', 3: 4}", "keys of SETTINGS are texts such as 'trainer.lr', found 3"),
        ("SETTINGS = {'model': 'm', 'model.name': 1}", "SETTINGS['model.name']: 'model' is a value, not a section"),
        ("SETTINGS = {'model': 'm', 'data.train': 'x', 'trainer.lrr': 1}", "trainer.lrr: no such key; did you mean"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "keys", ["'trainer.lr': 1e-3, 'trainer': {'steps': 3}", "'trainer': {'steps': 3}, 'trainer.lr': 1e-3"]
)
def test_a_dotted_key_and_its_section_come_in_any_order(keys: str, tmp_path: Path) -> None:
    config = load(tmp_path, f"SETTINGS = {{'model': 'm', 'data.train': 'generate:calculator/train', {keys}}}")
    assert (config.trainer.lr, config.trainer.steps) == (1e-3, 3)


@pytest.mark.parametrize("key", ["'agent.settings.env': ENV", "'agent': {'settings': {'env': ENV}}"])
def test_settings_name_one_environment_of_two(key: str, tmp_path: Path) -> None:
    text = f"ENV = __file__ + ':Other'\n{GAME}class Other(Game): ...\nSETTINGS = {{'model': 'm', {key}}}"
    config = load(tmp_path, text)
    assert (config.agent.loop, config.agent.settings["env"].rpartition(":")[2]) == ("gymnasium", "Other")


TASKS = [("1+1?", "2"), {"level": 3}, {"prompt": [{"role": "user", "content": "?"}], "data_source": "d",
         "reward_model": {"ground_truth": "x"}, "extra_info": {"k": 1}}]  # fmt: skip


def written(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_tasks_of_a_file_become_rows(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        f"TASKS = {TASKS!r}\ndef few():\n    return TASKS[:1]\nNONE = []\nBAD = [('1+1?', '2'), 7]\nn = 1/1\n"
        "def leaves():\n    raise SystemExit('done')\n"
    )
    rows = written(materialise(f"{file}:TASKS", tmp_path))
    assert [row["data_source"] for row in rows] == ["game", "game", "d"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "environment", "x"]
    assert (rows[0]["prompt"][0]["content"], rows[1]["extra_info"]["env"], rows[2]["extra_info"]["k"]) == (
        "1+1?",
        {"level": 3},
        1,
    )
    assert len(written(materialise(f"{file}:few", tmp_path))) == 1
    for name, words in (
        ("NONE", "has no tasks"),
        ("BAD", "BAD, task 2: expected"),
        ("TASK", "did you mean"),
        ("n", "n: "),
        ("leaves", rf"leaves: SystemExit: done \({file}, line 8\)"),
    ):
        with pytest.raises(BadSpec, match=words):
            check_spec(f"{file}:{name}")


def test_tasks_may_have_ground_truths_of_several_types(tmp_path: Path) -> None:
    file = tmp_path / "mixed.py"
    file.write_text(
        "import numpy as np\n"
        "TASKS = [('a', [2, 'b']), ('b', 3), ('c', {'k': None}), ('d', np.int64(4)), ('e', np.ones(2))]\n"
        "BYTES = [('a', 'b'), ('c', b'd')]\nSET = [('a', {1})]\n"
    )
    truths = [row["reward_model"]["ground_truth"] for row in written(materialise(f"{file}:TASKS", tmp_path))]
    assert truths == [[2, "b"], 3, {"k": None}, 4, [1.0, 1.0]]
    for name, words in (("BYTES", "BYTES, task 2: .*bytes.*; tasks are made of texts"), ("SET", "SET, task 1: .*set")):
        with pytest.raises(BadSpec, match=words):
            check_spec(f"{file}:{name}")


def test_the_shipped_example_has_at_most_35_lines_and_a_proof() -> None:
    file = RECIPES / "own_environment/doors.py"
    assert len(file.read_text().splitlines()) <= 35
    config = load_config(file)
    assert config.agent.loop == "gymnasium"
