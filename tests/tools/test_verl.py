from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from penstock.tools import (
    BaseTool,
    ToolConfig,
    ToolConfigError,
    ToolResult,
    check_arguments,
    function_tool,
    make_tools,
    read_tools,
    register_tool,
)

SEARCH = """
tools:
  - class_name: "verl.tools.search_tool.SearchTool"
    config: {"retrieval_service_url": "http://127.0.0.1:8000/retrieve", "num_workers": 120, "rate_limit": 60,
             "timeout": 30, "type": native, "topk": 5}
    tool_schema:
      type: "function"
      function:
        name: "lookup"
        description: "Searches the web for relevant information."
        parameters:
          type: "object"
          properties:
            query_list: {type: "array", item: {type: "string"}, description: "Queries."}
          required: ["query_list"]
"""


@register_tool("double")
@function_tool
def double(n: int) -> int:
    """Twice."""
    return 2 * n


def entries(text: str, tmp_path: Path) -> list[ToolConfig]:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    return [ToolConfig.model_validate(entry) for entry in read_tools(str(file))]


def test_verl_verls_search_entry_makes_our_search_tool(tmp_path: Path) -> None:
    (config,) = entries(SEARCH, tmp_path)
    assert (config.name, config.concurrency, config.timeout_s) == ("search", 60, 35.0)
    assert config.settings == {"url": "http://127.0.0.1:8000/retrieve", "topk": 5, "request_timeout_s": 30.0}
    (tool,) = make_tools([config], None).values()
    assert (tool.name, tool.description) == ("lookup", "Searches the web for relevant information.")
    assert tool.schema["function"]["parameters"]["required"] == ["query_list"]
    assert check_arguments(tool.parameters, {"query_list": ["a"]}) is None
    assert ToolConfig.model_validate(config.model_dump()) == config


def test_verl_users_own_class_keeps_its_path_and_config() -> None:
    entry = {"type": "native", "size": 3, "num_workers": 120, "rate_limit": 8}
    config = ToolConfig.model_validate({"class_name": "my.tools.Mine", "config": entry, "cut": "head"})
    assert (config.name, config.settings) == ("my.tools.Mine", {"size": 3})
    assert (config.concurrency, config.cut) == (8, "head")


@register_tool("calc")
class CalcTool(BaseTool):
    """verl keeps name, description and parameters in the YAML file only."""

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(str(arguments["a"] * 2))


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_verl_class_without_a_schema_takes_it_from_the_file() -> None:
    function = {"name": "calc_it", "description": "Doubles\na number.", "parameters": PARAMETERS}
    (tool,) = make_tools([ToolConfig(name="calc", tool_schema={"function": function})], None).values()
    assert (tool.name, tool.description, tool.parameters) == ("calc_it", "Doubles a number.", PARAMETERS)


@pytest.mark.parametrize("field", ["name", "description", "parameters"])
def test_verl_field_that_neither_class_nor_file_has_is_named(field: str) -> None:
    function = {"name": "calc_it", "description": "Doubles.", "parameters": PARAMETERS}
    for lacking in ({key: value for key, value in function.items() if key != field}, {**function, field: None}):
        with pytest.raises(ToolConfigError, match=f"CalcTool has no {field} "):
            make_tools([ToolConfig(name="calc", tool_schema={"function": lacking})], None)
    with pytest.raises(ToolConfigError, match="CalcTool has no name "):
        make_tools([ToolConfig(name="calc")], None)


def test_verl_code_runs_in_recipes_sandbox_and_entry_says_so(caplog: pytest.LogCaptureFixture) -> None:
    entry = {
        "class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
        "config": {"sandbox_fusion_url": "http://x"},
    }
    assert ToolConfig.model_validate(entry).name == "python"
    assert "sandbox_fusion_url has no effect" in caplog.text


def test_verl_mcp_entries_name_the_file_of_servers() -> None:
    mcp = {"mcp_servers_config_path": "./mcp_server.json", "tool_selected_list": ["tavily_search_tool"]}
    entry = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "config": {"rate_limit": 120, "timeout": 120}}
    config = ToolConfig.model_validate({**entry, "mcp": mcp})
    assert (config.name, config.concurrency, config.timeout_s) == ("mcp", 120, 125.0)
    assert config.settings == {"servers_file": "./mcp_server.json", "select": ["tavily_search_tool"]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}, "Gsm8kTool has no counterpart"),
        ({"class_name": "verl.tools.search_tool.SearchTool"}, "needs retrieval_service_url"),
        (
            {"class_name": "verl.tools.search_tool.SearchTool", "config": {"retrieval_service_url": "u", "colour": 1}},
            "no counterpart of config: colour",
        ),
        ({"class_name": "my.Tool", "confg": {}}, "confg"),
    ],
)
def test_verl_what_has_no_counterpart_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ToolConfig.model_validate(entry)


async def test_verl_tool_schema_renames_a_tool() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema: dict[str, Any] = {"type": "function", "function": {"name": "twice", "parameters": parameters}}
    config = ToolConfig(name="double", tool_schema=schema)
    (tool,) = make_tools([config], None).values()
    assert (tool.name, tool.description, double.name) == ("twice", "Twice.", "double")
    assert (await tool.execute(None, {"n": 4})).text == "8"
    schema["function"]["parameters"] = {"type": "object", "properties": {"m": {"type": "integer"}}}
    with pytest.raises(ToolConfigError, match="no 'n', which this tool needs"):
        make_tools([config], None)


@pytest.mark.parametrize("text", ["[1, 2]", "tool: []", "tools: 3", "a: [", None])
def test_verl_file_without_tools_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tools.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"tools.yaml: no YAML file with a list of tools"):
        read_tools(str(file))
    assert read_tools(yaml.safe_load("[{name: python}]")) == [{"name": "python"}]
