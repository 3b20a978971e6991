"""Each parser's forms, good and broken: what stays content, and what the model is told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.tools.parsers import ToolCall, get_parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
SEP, END_CALL, END_CALLS = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = ToolCall("f", {"x": 1}, "call_0")


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("qwen3_coder", f"a{OPEN}<function=f><parameter=x>1</parameter></function>{CLOSE}b", "ab", (F,)),
        ("qwen3_coder", f"{OPEN}\n<function=f>\n</function>\n{CLOSE}", "", (ToolCall("f", {}, "call_0"),)),
        ("glm", f"a{OPEN}f<arg_key>x</arg_key><arg_value>1</arg_value>{CLOSE}b", "ab", (F,)),
        ("glm", f"{OPEN}f\n{CLOSE}", "", (ToolCall("f", {}, "call_0"),)),
        ("llama3_json", 'a\n{"name": "f", "parameters": {"x": 1}}\nb', "a\n\nb", (F,)),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", (F,)),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", (F,)),
        ("llama3_json", '{"name": "f", "arguments": {"x": 1}}', "", (F,)),
        ("llama3_json", '{"name": "Ada", "age": 5}', '{"name": "Ada", "age": 5}', ()),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', ()),
        ("mistral", 'a[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}] b', "a b", (F,)),
        ("mistral", 'a[TOOL_CALLS]f[ARGS]{"x": 1}', "a", (F,)),
        ("deepseek", f'a{CALLS}{CALL}f{SEP}{{"x": 1}}{END_CALL}{END_CALLS}b', "ab", (F,)),
        ("deepseek", f'{CALLS}{CALL}f{SEP}{{"x": 1}}{END_CALL}', "", (F,)),
        ("harmony", f'{TO_F}{{"x": 1}}<|call|>', "", (F,)),
        ("harmony", f'{TO_F}{{"x": 1}}', "", (F,)),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", (F,)),
        ("harmony", '<|channel|>analysis to=python <|message|>{"x": 1}', "", (ToolCall("python", {"x": 1}, "call_0"),)),
        ("harmony", "<|channel|>final<|message|>to=f<|return|>", "<|channel|>final<|message|>to=f<|return|>", ()),
        ("code", "a\n```python\nx\n```\nb", "a\n\nb", (ToolCall("python", {"code": "x"}, "call_0"),)),
        ("code", "````py\n```\n````", "", (ToolCall("python", {"code": "```"}, "call_0"),)),
        ("code", "```sh\nls\n```", "", (ToolCall("shell", {"command": "ls"}, "call_0"),)),
        ("code", "```json\n```python\nx\n```", "```json\n```python\nx\n```", ()),
        ("code", "```\nx\n```", "```\nx\n```", ()),
        ("code", "```python\nx\n```\n</think>no", "```python\nx\n```\n</think>no", ()),
    ],
)
def test_calls_and_what_stands_around_them(parser: str, text: str, content: str, calls: tuple[Any, ...]) -> None:
    turn = get_parser(parser).parse(text)
    assert (turn.content, turn.calls) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        ("qwen3_coder", f"{OPEN}<function=f><parameter=x>1</function>{CLOSE}", "</parameter> is missing"),
        ("qwen3_coder", f"{OPEN}<function=f><parameter=x>1</parameter>{CLOSE}", "stands where </function> belongs"),
        ("qwen3_coder", f"{OPEN}<function=f></function>", "</tool_call> is missing"),
        ("qwen3_coder", f"{OPEN}<function=></function>{CLOSE}", "a name and > belong behind ="),
        ("qwen3_coder", f"{OPEN}<function=f g></function>{CLOSE}", "'f g' is no name of a tool"),
        ("qwen3_coder", f'{OPEN}{{"name": "f", "arguments": {{}}}}{CLOSE}', "stands where <function= belongs"),
        (
            "qwen3_coder",
            f"{OPEN}<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>{CLOSE}",
            "the argument 'x' is given twice",
        ),
        (
            "qwen3_coder",
            f"{OPEN}<function=f><parameter=x>{OPEN}</parameter></function>{CLOSE}",
            "the argument 'x' holds <tool_call>",
        ),
        ("glm", f"{OPEN}f<arg_key>x</arg_key>{CLOSE}", "stands where <arg_value> belongs"),
        ("glm", f"{OPEN}f", "</tool_call> is missing"),
        ("glm", f"{OPEN}{CLOSE}", "the name of the tool is missing"),
        ("glm", f"{OPEN}f<arg_key></arg_key><arg_value>1</arg_value>{CLOSE}", "an argument has no name"),
        ("glm", f"{OPEN}f<arg_key>x</arg_key><arg_value>\ud800</arg_value>{CLOSE}", "no Unicode text"),
        (
            "glm",
            f"{OPEN}f<arg_key>x</arg_key><arg_value>{'[' * 99}{']' * 99}</arg_value>{CLOSE}",
            "more than 64 levels",
        ),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}', "no valid JSON"),
        ("llama3_json", '{"name": "f", "parameters": 1}', '"parameters" must be a JSON object'),
        ("llama3_json", "<|python_tag|>print(1)", "no valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "the list of calls is empty"),
        ("mistral", "[TOOL_CALLS]", "neither a list of calls nor NAME[ARGS]"),
        ("mistral", '[TOOL_CALLS]f{"x": 1}', "neither a list of calls nor NAME[ARGS]"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "the arguments must be a JSON object"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]', '"arguments" must be a JSON object'),
        ("deepseek", f"{CALLS}f{SEP}{{}}{END_CALL}", f"stands where {CALL} belongs"),
        ("deepseek", f"{CALLS}{CALL}f{{}}{END_CALL}", f"a name and {SEP} belong"),
        ("deepseek", f"{CALLS}{CALL}f{SEP}{{}}", f"{END_CALL} is missing"),
        ("deepseek", f"{CALLS}{CALL}code{SEP}f\n```json\n{{}}\n```{END_CALL}", "no kind of tool 'code'"),
        ("deepseek", f"{CALLS}{CALL}function{SEP}f\n```json\n{{}}{END_CALL}", "stands where ``` belongs"),
        ("harmony", f"{TO_F}print(1)<|call|>", "no valid JSON"),
        ("harmony", f"{TO_F}{{}}<|end|>", "stands where <|call|> belongs"),
        ("harmony", "<|channel|>commentary to=functions. <|message|>{}<|call|>", "the name of the tool is missing"),
        ("harmony", " to=functions.f<|message|>{}<|call|>", "one channel and one address"),
        ("code", "```python\nx", "the block is not closed"),
        ("code", "```python\n\n```", "the block is empty"),
        ("code", "```python\n\ud800\n```", "no Unicode text"),
    ],
)
def test_a_malformed_call_is_told_in_words(parser: str, text: str, message: str) -> None:
    call = get_parser(parser).parse(text).calls[0]
    assert message in (call.error or "")
    assert not call.arguments


def test_json_with_the_same_key_twice_is_refused() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"path": "a", "path": "b"}}</tool_call>'
    assert "the same key twice" in (get_parser("hermes").parse(text).calls[0].error or "")


def test_a_turn_has_at_most_so_many_calls() -> None:
    turn = get_parser("hermes").parse('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 200)
    assert [call.error for call in turn.calls[:128]] == [None] * 128
    assert [call.error for call in turn.calls[128:]] == ["only the first 128 calls of a turn are read"]
