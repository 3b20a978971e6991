"""Golden tables: the forms of each parser's syntax, good and broken, and the calls, content and errors they give."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from tests.tools.parsers.families import CODE_FAMILY, FAMILIES, render

from penstock.agent_loops import AgentConfig
from penstock.tools.arguments import ArgumentSchema
from penstock.tools.parsers import ParserName, ToolCall, get_parser
from penstock.tools.parsers.plain_text import typed

HERMES_CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
OPTIONAL_MODEL = {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
SEP, END_CALL, END_CALLS = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
LFM, END_LFM, MINI = "<|tool_call_start|>", "<|tool_call_end|>", "<minimax:tool_call>"
F_JSON = '{"name": "f", "arguments": {"x": 1}}'
F = ToolCall("f", {"x": 1}, "call_0")
F_AGAIN = ToolCall("f", {"x": 1}, "call_1")
ACTION, END_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"
F_COHERE = '{"tool_call_id": "4", "tool_name": "f", "parameters": {"x": 1}}'
F_COMMAND_R = '{"tool_name": "f", "parameters": {"x": 1}}'
RULED = f"Action:\n```json\n[{F_COMMAND_R}]```"
"""Not at the beginning of a line."""
HY, HY_CALL = "<tool_calls:opensource>\n", "<tool_call:opensource>f<tool_sep:opensource>\n"
HY_PAIR = "<arg_key:opensource>x</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n"
K3, END_K3 = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
K3_CALL, END_K3_CALL = '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>"
K3_JSON = '<|open|>json type="object"<|sep|>{"x": 1}<|close|>json<|sep|>'
ATEM_F = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="x">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)


def argument(key: str, kind: str, value: str) -> str:
    """Kimi K3's."""
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", "  The answer is 42.\n", "The answer is 42.", ()),
        ("hermes", "", "", ()),
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
        ("pythonic", "[f(x=1)]", "", (F,)),
        ("pythonic", "I think [f(x=2)]</think>\n[f(x=1)]", "I think [f(x=2)]</think>", (F,)),
        ("pythonic", "<|python_start|>[f(x=1)]<|python_end|><|eot|>", "<|python_end|><|eot|>", (F,)),
        ("pythonic", "Look: [f(x=1)]", "Look: [f(x=1)]", ()),
        ("pythonic", "Look:\n[f(x=1)]", "Look:\n[f(x=1)]", ()),
        ("pythonic", "[f(x=1)] finds it.", "[f(x=1)] finds it.", ()),
        ("pythonic", "[f(x=2)]</think>\nSo: [f(x=1)].", "[f(x=2)]</think>\nSo: [f(x=1)].", ()),
        ("pythonic", "[f(x='</think>')]", "", (ToolCall("f", {"x": "</think>"}, "call_0"),)),
        ("pythonic", "see [f(x) for x in y] and [1] and a[f()]", "see [f(x) for x in y] and [1] and a[f()]", ()),
        ("pythonic", "[f()]", "", (ToolCall("f", {}, "call_0"),)),
        ("pythonic", '[f(x="say "hi", no")]', "", (ToolCall("f", {"x": 'say "hi", no'}, "call_0"),)),
        ("pythonic", "[f(x=Paris, France, y=2)]", "", (ToolCall("f", {"x": "Paris, France", "y": 2}, "call_0"),)),
        (
            "pythonic",
            "[f(x={'k': [True, None, false, -1.5e3]}, y='a\nb', z='\\'\\t')]",
            "",
            (ToolCall("f", {"x": {"k": [True, None, False, -1500.0]}, "y": "a\nb", "z": "'\t"}, "call_0"),),
        ),
        (
            "pythonic",
            r"""[f(x="\ud83d\ude42", y='\x41"')]""",
            "",
            (ToolCall("f", {"x": "🙂", "y": 'A"'}, "call_0"),),
        ),
        ("lfm2", f"a{LFM}[f(x='it's')]{END_LFM}b", "ab", (ToolCall("f", {"x": "it's"}, "call_0"),)),
        ("gemma4", "<|tool_call>call:f{x:1}<tool_call|><|tool_response>", "<|tool_response>", (F,)),
        (
            "gemma4",
            '<|tool_call>call:f{x:{<|"|>a b<|"|>:<|"|>,}<|"|>},y:None}<tool_call|>',
            "",
            (ToolCall("f", {"x": {"a b": ",}"}, "y": None}, "call_0"),),
        ),
        ("xlam", f"<think>[{F_JSON}]</think>\n[{F_JSON}]", f"<think>[{F_JSON}]</think>", (F,)),
        ("xlam", '[] and [1] and [{"name": "f"}]', '[] and [1] and [{"name": "f"}]', ()),
        ("phi4_mini", f"functools[{F_JSON}]", "", (F,)),
        ("granite", f"<|tool_call|> [{F_JSON}]", "", (F,)),
        ("internlm2", f"a<|action_start|><|plugin|>\n{F_JSON}<|action_end|>\n", "a", (F,)),
        ("granite_20b_fc", f"a<function_call> {F_JSON}<|endoftext|>", "a<|endoftext|>", (F,)),
        ("cohere", f"a{ACTION}[{F_COHERE}]{END_ACTION}b", "ab", (ToolCall("f", {"x": 1}, "call_0", "4"),)),
        ("cohere", f"{ACTION}{F_COHERE}{END_ACTION}", "", (ToolCall("f", {"x": 1}, "call_0", "4"),)),
        ("cohere", f'{ACTION}[{{"tool_name": "f", "parameters": {{"x": 1}}}}]{END_ACTION}', "", (F,)),
        ("command_r", f"Plan: x\nAction: ```json\n[{F_COMMAND_R}]```\nb", "Plan: x\n\nb", (F,)),
        ("command_r", f"Action: ask.\nAn Action:\n```json\n[{F_COMMAND_R}]```", f"Action: ask.\nAn {RULED}", ()),
        ("gigachat3", f"a<|function_call|>{F_JSON}<|message_sep|>", "a<|message_sep|>", (F,)),
        ("apertus", 'a<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>b', "ab", (F,)),
        ("hunyuan_a13b", f"a<tool_calls>[{F_JSON}]</tool_calls>b", "ab", (F,)),
        ("hunyuan_a13b", f"<tool_calls>\n{F_JSON}\n{F_JSON}\n</tool_calls>", "", (F, F_AGAIN)),
        ("hunyuan_a13b", f'<tool_calls>[{F_JSON[:-1]}, "id": "7"}}]</tool_calls>', "", (F,)),
        ("hy_v3", f"a{HY}{HY_CALL}{HY_PAIR}</tool_call:opensource>\n</tool_calls:opensource>b", "ab", (F,)),
        ("minicpm5", 'a<function name="f"><param name="x">1</param></function>b', "ab", (F,)),
        (
            "minicpm5",
            '<function name="f"><param name="x"><![CDATA[1 < "2"\n]]></param></function>',
            "",
            (ToolCall("f", {"x": '1 < "2"\n'}, "call_0"),),
        ),
        ("nemotron", f"a<TOOLCALL>[{F_JSON}, {F_JSON}]</TOOLCALL>", "a", (F, F_AGAIN)),
        ("functionary", 'a<function=f>{"x": 1}</function>\n<function=f>{"x": 1}</function>b', "a\nb", (F, F_AGAIN)),
        ("functionary_v3_2", 'f\n{"x": 1}', "", (F,)),
        ("functionary_v3_2", 'all\nLook.>>>f\n{"x": 1}>>>f\n{"x": 1}', "all\nLook.", (F, F_AGAIN)),
        ("functionary_v3_2", 'all\n{"x": 1}', 'all\n{"x": 1}', ()),
        ("functionary_v3_2", "all\n>>> f\n{1}\n>>>f\nx", "all\n>>> f\n{1}\n>>>f\nx", ()),
        ("kimi_k3", f"a{K3}{K3_CALL}{argument('x', 'number', '1')}{END_K3_CALL}{END_K3}b", "ab", (F,)),
        ("kimi_k3", f"{K3}{K3_CALL}{K3_JSON}{END_K3_CALL}{END_K3}", "", (F,)),
        (
            "kimi_k3",
            f"{K3}{K3_CALL}{argument('a&amp;&quot;', 'string', '&amp; 1')}{END_K3_CALL}{END_K3}",
            "",
            (ToolCall("f", {'a&"': "&amp; 1"}, "call_0"),),
        ),
        ("muse_glimmer", f" to=f<|message|>{ATEM_F}<|eot|>", "", (F,)),
        ("muse_glimmer", f" to=self<|message|>{ATEM_F}<|eom|>", f"to=self<|message|>{ATEM_F}<|eom|>", ()),
        ("muse_glimmer", f" to=user<|message|>{ATEM_F}<|eot|>", f"to=user<|message|>{ATEM_F}<|eot|>", ()),
        ("muse_glimmer", ATEM_F, ATEM_F, ()),
        ("code", "a\n```python\nx\n```\nb", "a\n\nb", (ToolCall("python", {"code": "x"}, "call_0"),)),
        ("code", "````py\n```\n````", "", (ToolCall("python", {"code": "```"}, "call_0"),)),
        ("code", "```sh\nls\n```", "", (ToolCall("shell", {"command": "ls"}, "call_0"),)),
        ("code", "```json\n```python\nx\n```", "```json\n```python\nx\n```", ()),
        ("code", "```\nx\n```", "```\nx\n```", ()),
        ("code", "```python\nx\n```\n</think>no", "```python\nx\n```\n</think>no", ()),
    ],
)
def test_parser_separates_calls_and_content(parser: str, text: str, content: str, calls: tuple[Any, ...]) -> None:
    turn = get_parser(parser).parse(text)
    assert (turn.content, turn.calls) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text", "message"),
    [
        ("qwen3_coder", f"{OPEN}<function=f><parameter=x>1</function>{CLOSE}", "</parameter> is missing"),
        ("qwen3_coder", f"{OPEN}<function=f><parameter=x>1</parameter>{CLOSE}", "stands where </function> belongs"),
        ("qwen3_coder", f"{OPEN}<function=f></function>", "</tool_call> is missing"),
        ("qwen3_coder", f"{OPEN}<function=></function>{CLOSE}", "a name and > belong behind ="),
        ("qwen3_coder", f"{OPEN}<function=f g></function>{CLOSE}", "'f g' is not a name of a tool"),
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
        ("pythonic", "[f(x=1)", ", is missing"),
        ("pythonic", "[f(x='a", "a quoted text is not closed"),
        ("pythonic", "[f(x=1, x=2)]", "the argument 'x' is given twice"),
        ("pythonic", "[f(x=1, 2)]", "arguments are written KEY=VALUE"),
        ("pythonic", "[f(x=[1)]", "stands where , belongs"),
        ("pythonic", f"[f(x={'[' * 99}{']' * 99})]", "more than 64 levels"),
        ("pythonic", f"[f(x=[{'9' * 5000}])]", "a number is too long"),
        ("lfm2", f"{LFM}[]{END_LFM}", "the list of calls is empty"),
        ("lfm2", f"{LFM}f(x=1){END_LFM}", "stands where [ belongs"),
        ("lfm2", f"{LFM}[f(x=1)]", f"{END_LFM} is missing"),
        ("gemma4", "<|tool_call>f{x:1}<tool_call|>", "call:NAME{ belongs behind <|tool_call>"),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a}<tool_call|>', 'a text is not closed by <|"|>'),
        ("gemma4", "<|tool_call>call:f{x:a}<tool_call|>", "'a}<tool_call|>' begins no value"),
        ("gemma4", "<|tool_call>call:f{x:1,x:2}<tool_call|>", "the same key twice"),
        ("gemma4", "<|tool_call>call:f{x:1}", "<tool_call|> is missing"),
        ("minimax_m2", f"{MINI}</minimax:tool_call>", "stands where <invoke name="),
        ("minimax_m2", f'{MINI}<invoke name="f"><parameter name="x">1</invoke>', "</parameter> is missing"),
        ("minimax_m2", f'{MINI}<invoke name="f">', "</invoke> is missing"),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
            '<｜DSML｜parameter name="x" string="false">a</｜DSML｜parameter>',
            "'a' is not JSON",
        ),
        ("xlam", f"[{F_JSON}", "no valid JSON"),
        ("xlam", f"[{F_JSON}, 1]", "it must be a JSON object"),
        ("phi4_mini", "functools[]", "the list of calls is empty"),
        ("granite", f"<|tool_call|>{F_JSON}", "calls are written as a JSON list"),
        ("internlm2", f"<|action_start|><|interpreter|>{F_JSON}<|action_end|>", "stands where <|plugin|> belongs"),
        ("internlm2", f"<|action_start|><|plugin|>{F_JSON}", "<|action_end|> is missing"),
        ("seed_oss", "<seed:tool_call><function=f></function>", "</seed:tool_call> is missing"),
        ("granite_20b_fc", '<function_call> {"name": "f"}', '"arguments" must be a JSON object'),
        ("gigachat3", "<|function_call|>f", "no valid JSON"),
        ("cohere", f"{ACTION}[{F_COHERE}]", f"{END_ACTION} is missing"),
        ("cohere", f"{ACTION}[{F_JSON}]{END_ACTION}", '"tool_name" must be a text'),
        ("cohere", f"{ACTION}[{F_COHERE}, {F_COHERE}]{END_ACTION}", '"tool_call_id" must count up by one'),
        ("cohere", f"{ACTION}[{F_COHERE}, {F_COMMAND_R}]{END_ACTION}", "of each call or of none"),
        ("cohere", f"{ACTION}[{F_COHERE.replace('4', 'x')}]{END_ACTION}", "must be a number in quotes"),
        ("cohere", f"{ACTION}[{F_COHERE.replace('4', '1000')}]{END_ACTION}", "must be a number in quotes"),
        ("cohere", f"{ACTION}[]{END_ACTION}", "the list of calls is empty"),
        ("command_r", f"Action:\n```json\n[{F_COMMAND_R}]", "``` is missing"),
        ("command_r", f"Action:\n```json\n[{F_JSON}]```", '"tool_name" must be a text'),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>', "the name of its tool as the only key"),
        ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', '"arguments" must be a JSON object'),
        ("apertus", '<|tools_prefix|>{"f": {}}<|tools_suffix|>', "calls are written as a JSON list"),
        ("granite_20b_fc", "<function_call> 1", 'a call is written <function_call> {"name": ..., "arguments": {...}}'),
        ("hunyuan_a13b", f"<tool_calls>[{F_JSON}]", "</tool_calls> is missing"),
        ("hunyuan_a13b", f"<tool_calls>{F_JSON}, {F_JSON}</tool_calls>", "stands where </tool_calls> belongs"),
        ("hy_v3", f"{HY}</tool_calls:opensource>", "stands where <tool_call:opensource> belongs"),
        ("hy_v3", f"{HY}{HY_CALL}{HY_PAIR * 2}", "the argument 'x' is given twice"),
        ("hy_v3", f"{HY}{HY_CALL[:-20]}", "<tool_sep:opensource> is missing"),
        ("minicpm5", '<function name="f"><param name="x">1</function>', "</param> is missing"),
        ("minicpm5", '<function name="f"><param name="x"><![CDATA[1</param>', "]]></param> is missing"),
        ("minicpm5", "<function name=f></function>", '"NAME"> belongs behind <function name='),
        ("nemotron", f"<TOOLCALL>{F_JSON}</TOOLCALL>", "calls are written as a JSON list"),
        ("functionary", "<function=f>[1]</function>", "the arguments must be a JSON object"),
        ("functionary", "<function=>{}</function>", "a name and > belong behind <function="),
        ("functionary_v3_2", 'f\n{"x": 1', "no valid JSON"),
        ("kimi_k3", f"{K3}{END_K3}", 'call tool="NAME" belongs'),
        ("kimi_k3", f"{K3}{K3_CALL}{argument('x', 'number', 'one')}", "'one' is not JSON"),
        ("kimi_k3", f"{K3}{K3_CALL}{argument('x', 'string', '<|open|>')}", "a value holds <|open|>"),
        ("kimi_k3", f"{K3}{K3_CALL}{argument('x', 'string', '1') * 2}", "the argument 'x' is given twice"),
        ("kimi_k3", f"{K3}{K3_CALL}{argument('', 'string', '1')}", "an argument has no key"),
        ("kimi_k3", f"{K3}{K3_CALL}{END_K3}", "stands where <|close|>call<|sep|> belongs"),
        ("muse_glimmer", f" to=f<|message|>{ATEM_F.replace('</atem:inv', '')}<|eot|>", "where </atem:invoke> belongs"),
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
        ("deepseek", f"{CALLS}{CALL}code{SEP}f\n```json\n{{}}\n```{END_CALL}", "unknown kind of tool 'code'"),
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
def test_parser_names_what_is_malformed(parser: str, text: str, message: str) -> None:
    call = get_parser(parser).parse(text).calls[0]
    assert message in (call.error or "")
    assert not call.arguments


def test_parser_refuses_a_json_key_given_twice() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"path": "a", "path": "b"}}</tool_call>'
    assert "the same key twice" in (get_parser("hermes").parse(text).calls[0].error or "")


@pytest.mark.parametrize(
    ("parser", "opening", "call", "closing"),
    [
        ("hermes", "", f"{OPEN}{F_JSON}{CLOSE}", ""),
        ("hunyuan_a13b", "<tool_calls>", f"{F_JSON}\n", "</tool_calls>"),
    ],
)
def test_parser_bounds_the_calls_of_a_turn(parser: str, opening: str, call: str, closing: str) -> None:
    turn = get_parser(parser).parse(f"{opening}{call * 200}{closing}")
    assert [call.error for call in turn.calls[:128]] == [None] * 128
    assert [call.error for call in turn.calls[128:]] == ["only the first 128 calls of a turn are read"]


def test_hermes_reads_several_calls() -> None:
    turn = get_parser("hermes").parse(f"first {HERMES_CALL} then\n{HERMES_CALL.replace('print(1)', 'x</tool_call>y')}")
    assert turn.content == "first  then"
    assert turn.calls == (
        ToolCall("python", {"code": "print(1)"}, "call_0"),
        ToolCall("python", {"code": "x</tool_call>y"}, "call_1"),
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{name: 1}", "no valid JSON"),
        ('{"name": "python"}', '"arguments" must be a JSON object'),
        ('{"name": "python", "arguments": "{}"}', '"arguments" must be a JSON object'),
        ('{"name": 3, "arguments": {}}', '"name" must be a text'),
        ('{"name": "", "arguments": {}}', '"name" must be a text'),
        ('["python"]', "it must be a JSON object"),
        ('{"name": "python", "arguments": {}, "id": 1}', "'id' has no meaning here"),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', "no Unicode text"),
        ('{"name": "python", "arguments": {"x": NaN}}', "NaN is no JSON"),
        ('{"name": "python", "arguments": {"x": 1e999}}', "a number that is too large"),
        ('{"name": "python", "arguments": {"x": ' + "9" * 5000 + "}}", "no valid JSON"),
        ('{"name": "python", "arguments": {"x": ' + "[" * 100_000, "no valid JSON"),
        ('{"name": "python", "arguments": {}} and more', "other text stands where </tool_call> belongs"),
        ("", "no valid JSON"),
    ],
)
def test_hermes_error_does_not_hide_the_next_call(body: str, message: str) -> None:
    turn = get_parser("hermes").parse(f"a <tool_call>{body}</tool_call> b {HERMES_CALL}")
    assert turn.content == "a  b"
    assert [call.call_id for call in turn.calls] == ["call_0", "call_1"]
    assert message in (turn.calls[0].error or "")
    assert not turn.calls[0].arguments
    assert turn.calls[1] == ToolCall("python", {"code": "print(1)"}, "call_1")


def test_hermes_names_a_call_cut_off() -> None:
    assert "</tool_call> is missing" in (
        get_parser("hermes").parse(HERMES_CALL.removesuffix("</tool_call>")).calls[0].error or ""
    )
    assert "no valid JSON" in (get_parser("hermes").parse(HERMES_CALL[:40]).calls[0].error or "")
    two = get_parser("hermes").parse(f"<tool_call>{{ {HERMES_CALL}")
    assert [call.error is None for call in two.calls] == [False, True]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        (" 42\n", {"type": "integer"}, 42),
        ("4.0", {"type": "integer"}, 4.0),
        ("many", {"type": "integer"}, "many"),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ('{"x": 1}', OPTIONAL_MODEL, {"x": 1}),
        ('{"x": 1}', {"type": "object"}, {"x": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": 2}, 2),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ('"quoted"', None, '"quoted"'),
        ("5", {"type": 7, "anyOf": 3}, 5),
    ],
)
def test_typed_reads_a_value_by_its_schema(text: str, schema: Any, value: object) -> None:
    found = typed(text, ArgumentSchema({"properties": {"x": schema}}).types("x"))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("name", get_args(ParserName))
def test_parser_marks_delimit_its_calls(name: str) -> None:
    assert AgentConfig(parser=name).parser == name  # type: ignore[arg-type]
    parser = get_parser(name)
    families = [one for one in [*FAMILIES.values(), CODE_FAMILY] if one.parser == name]
    assert families
    for family in families:
        text = render(family, "", [("python", {"code": "1"})])
        assert parser.opening in text
        assert parser.closing in text
        whole = parser.parse(text).calls
        assert parser.parse(text[text.find(parser.opening) :]).calls == whole
        assert len(whole) == 1


@pytest.mark.parametrize(("wrong", "near"), [("herms", "hermes"), ("qwen3-coder", "qwen3_coder"), ("glm45", "glm")])
def test_parser_unknown_name_gives_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong!r}; did you mean {near!r}"):
        get_parser(wrong)
