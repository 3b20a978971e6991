"""docs/from/verl.md: its filter of long prompts, and its tool as an entry of verl's tool file."""

from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from tests.docs.pages import Fence, fences

from penstock.datasets import write_parquet
from penstock.tools import ToolConfig, make_tools, read_tools
from penstock.transfer_queue import Task

MODEL = Path(__file__).parents[3] / "recipes/calculator/model"


def program(name: str) -> Fence:
    (fence,) = (one for one in fences("docs/from/verl.md") if one.file == name)
    return fence


def test_long_prompts_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path/to/a").mkdir(parents=True)
    (tmp_path / "path/to/a/model").symlink_to(MODEL)
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": text}], "extra_info": {"index": number}}
        for number, text in enumerate(("What is 1 + 1?", "word " * 1100, "What is 2 + 2?"))
    ]
    write_parquet(rows, tmp_path / "train.parquet")
    (tmp_path / "short_prompts.py").write_text(program("short_prompts.py").text)
    runpy.run_path("short_prompts.py")
    table = pyarrow.parquet.read_table("short.parquet")
    assert [row["extra_info"]["index"] for row in table.to_pylist()] == [0, 2]
    assert table.schema == pyarrow.parquet.read_schema("train.parquet")


async def test_the_tool_is_an_entry_of_verls_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "check_tool.py").write_text(program("check_tool.py").text)
    monkeypatch.syspath_prepend(tmp_path)
    function = {
        "name": "check_answer",
        "description": "Other words.",
        "parameters": {"type": "object", "properties": {}},
    }
    function["parameters"] = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    entry = {
        "class_name": "check_tool.CheckTool",
        "config": {},
        "tool_schema": {"type": "function", "function": function},
    }
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    entries = [ToolConfig.model_validate(one) for one in read_tools(str(tmp_path / "tools.yaml"))]
    (tool,) = make_tools(entries, sandbox=None).values()
    state = await tool.create(Task("train/1", "train", [], "sums", "2"))
    result = await tool.execute(state, {"answer": "2"})
    assert (tool.name, result.text, result.reward, result.metrics) == (
        "check_answer",
        "right: True",
        1.0,
        {"checked": 1},
    )
