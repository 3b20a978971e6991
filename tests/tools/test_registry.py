from __future__ import annotations

from typing import Any, ClassVar

import pytest

from penstock.tools import (
    BaseTool,
    ToolConfig,
    ToolConfigError,
    ToolResult,
    configs_of,
    function_tool,
    make_tools,
    need_sandbox,
    register_tool,
)


@register_tool("echo")
class Echo(BaseTool):
    name = "echo_it"
    description = "Say it back."
    parameters: ClassVar[Any] = {"type": "object", "properties": {"text": {"type": "string"}}}
    defaults: ClassVar[Any] = {"times": 1}

    async def execute(self, state: Any, arguments: Any) -> ToolResult:
        return ToolResult(arguments["text"] * self.settings["times"])


@register_tool("verls")
class VerlsTool(Echo):
    """Its base class alone was changed."""

    async def execute(self, instance_id: str, parameters: Any, **_: Any) -> Any:
        return parameters["text"], 0.0, {}


@register_tool("made_as_verls")
class MadeAsVerls(Echo):
    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__(None)


@register_tool("add")
@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def make(name: str, **fields: Any) -> dict[str, BaseTool]:
    return make_tools([ToolConfig(name=name, **fields)], None)


async def test_registry_names_paths_settings_and_order() -> None:
    tools = make_tools(
        [ToolConfig(name="add"), ToolConfig(name="echo", settings={"times": 2}, max_output_chars=9)], None
    )
    assert list(tools) == ["add", "echo_it"]
    assert (await tools["echo_it"].execute(None, {"text": "ab"})).text == "abab"
    assert [config.max_output_chars for config in configs_of(tools).values()] == [2000, 9]
    assert (await tools["add"].execute(None, {"a": 1, "b": 2})).text == "3"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("pyton", {}, "'pyton'.*'python'"),
        ("zzz", {}, "'zzz'.*python"),
        ("penstock.tools.pythn:PythonTool", {}, "cannot import 'penstock.tools.pythn'"),
        ("penstock.tools.python.PythonTol", {}, "did you mean 'PythonTool'"),
        ("penstock.tools.python.STATE_LOST", {}, "a BaseTool subclass or a @function_tool is needed"),
        ("python", {}, "tool python needs a sandbox"),
        ("add", {"settings": {"x": 1}}, "takes no settings"),
        ("search", {"settings": {"urls": "http://x"}}, "unknown setting 'urls'; did you mean 'url'\\?"),
        ("verls", {}, "VerlsTool.execute takes instance_id, as verl's tools do; here it is execute\\(self, state, arg"),
        ("made_as_verls", {"settings": {"config": {}}}, "__init__ takes config and tool_schema, as verl's tools do"),
        ("echo", {"settings": {"time": 2}}, "unknown setting 'time'; did you mean 'times'\\?$"),
    ],
)
def test_registry_mistakes_in_a_recipe_are_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolConfigError, match=message):
        make(name, **fields)


@pytest.mark.parametrize("keyword_only", [True, False])
async def test_registry_constructor_may_have_settings_alone(keyword_only: bool) -> None:
    class Cut(Echo):
        def __init__(self, max_len: int = 100) -> None:
            self.max_len = max_len

        async def execute(self, state: Any, arguments: Any) -> ToolResult:
            return ToolResult(arguments["text"][: self.max_len])

    class CutToo(Cut):
        def __init__(self, *, max_len: int = 100) -> None:
            super().__init__(max_len)

    register_tool("cut")(CutToo if keyword_only else Cut)
    for settings, text in (({}, "abc"), ({"max_len": 2}, "ab")):
        assert (await make("cut", settings=settings)["echo_it"].execute(None, {"text": "abc"})).text == text
    with pytest.raises(ToolConfigError, match="unknown setting 'max_length'; did you mean 'max_len'"):
        make("cut", settings={"max_length": 2})


@pytest.mark.parametrize(
    ("names", "needed"), [(["python"], True), (["add", "search"], False), (["add", "shell"], True), (["mcp"], False)]
)
def test_registry_only_tools_with_boxes_need_a_sandbox(names: list[str], needed: bool) -> None:
    assert need_sandbox([ToolConfig(name=name) for name in names]) is needed


def test_registry_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolConfigError, match="two of them are called 'add'"):
        make_tools([ToolConfig(name="add"), ToolConfig(name="add")], None)


def test_registry_tool_without_schema_of_type_object_is_refused() -> None:
    @register_tool("bad")
    class Bad(Echo):
        parameters: ClassVar[Any] = {"type": "array"}

    with pytest.raises(ToolConfigError, match="must be a JSON schema of type object"):
        make("bad")


def test_registry_tool_schema_offers_what_the_tool_needs() -> None:
    combined = {"type": "object", "$ref": "#/$defs/P", "$defs": {"P": {"allOf": [add.parameters]}}}
    function = {"name": "plus", "parameters": combined}
    assert list(make("add", tool_schema={"type": "function", "function": function})) == ["plus"]
    for lacking in ({}, {"anyOf": [{"properties": {"a": {}}}, {"patternProperties": {"^c": {}}}]}):
        with pytest.raises(ToolConfigError, match=r"its parameters have no '[ab]', which this tool needs"):
            make("add", tool_schema={"function": {"parameters": {"type": "object", **lacking}}})
