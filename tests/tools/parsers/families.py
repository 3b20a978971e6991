"""How each family's chat template writes an assistant's turn with calls, in short; and how one call looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Template
from typing import Any


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def printed(value: Any) -> str:
    """As Jinja prints a value, but lists and mappings as JSON."""
    return as_json(value) if isinstance(value, list | dict) else str(value)


def python_text(value: Any) -> str:
    """LFM2: texts in quotes that are not escaped."""
    return f"'{value}'" if isinstance(value, str) else as_json(value) if isinstance(value, dict) else str(value)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(value[key])}" for key in sorted(value)) + "}"
    return f"[{','.join(map(gemma, value))}]" if isinstance(value, list) else as_json(value)


def cdata(value: Any) -> str:
    """MiniCPM5."""
    has_marks = isinstance(value, str) and any(mark in value for mark in "<&\n")
    return f"<![CDATA[{value}]]>" if has_marks else str(value)


@dataclass(frozen=True)
class Family:
    parser: str
    call: str
    """One call, of $name, $quoted (as JSON), $number, $arguments (as JSON), $written (by `value`) and $pairs."""
    whole: str = "$content$calls"
    between: str = ""
    """Two calls."""
    pair: str = ""
    """One argument, of $key, $value, and whether it is text: $is_text, $kind."""
    between_pairs: str = ""
    value: Callable[[Any], str] = text_or_json
    marks: tuple[str, ...] = ()
    """That no value may hold: the syntax has no way to write them."""
    wrapped: tuple[str, str] = ("", "")
    """What stands around the content, as content."""
    fit: Callable[[Any], Any] = lambda arguments: arguments
    """Arguments → those that the syntax can write, which is not all of them."""


def bare_keys(value: Any) -> Any:
    """Keys that need no quotes, in the order in which templates sort them."""
    if isinstance(value, dict):
        return {f"k{index}": bare_keys(value[key]) for index, key in enumerate(value)}
    return [bare_keys(one) for one in value] if isinstance(value, list) else value


def sorted_keys(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: bare_keys(arguments[key]) for key in sorted(arguments)}


def unescaped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Texts in quotes that are not escaped: what would need it is replaced."""
    texts = str.maketrans({"'": "’", '"': "”", "\\": "/"})
    return {key: value.translate(texts) if isinstance(value, str) else value for key, value in arguments.items()}


def one_line(arguments: dict[str, Any]) -> dict[str, Any]:
    """Texts without quotes: words alone."""
    return {
        key: "w" + "".join(letter for letter in value if letter.isalnum()) if isinstance(value, str) else value
        for key, value in unescaped(arguments).items()
        if not isinstance(value, list | dict | type(None)) and key != "mode"
    }


CALL = '{"name": $quoted, "arguments": $arguments}'
DEEPSEEK = "$content<｜tool▁calls▁begin｜>$calls<｜tool▁calls▁end｜>"
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
PYTHONIC = Family(
    "pythonic",
    "$name($pairs)",
    "<think>$content</think>\n[$calls]",
    between=", ",
    pair="$key=$value",
    between_pairs=", ",
    value=as_json,
    wrapped=("<think>", "</think>"),
)
QUOTED = replace(PYTHONIC, value=lambda value: f'"{value}"')
UNQUOTED = replace(PYTHONIC, value=str)
GLM = Family(
    "glm",
    "\n<tool_call>$name$pairs\n</tool_call>",
    pair="\n<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>",
    marks=("<tool", "</tool", "<arg", "</arg"),
)
DSML = Family(
    "deepseek_v32",
    '<｜DSML｜invoke name="$name">\n$pairs</｜DSML｜invoke>\n',
    "$content\n\n<｜DSML｜function_calls>\n$calls</｜DSML｜function_calls>",
    pair='<｜DSML｜parameter name="$key" string="$is_text">$value</｜DSML｜parameter>\n',
    marks=("<｜", "</｜"),
)
FAMILIES = {
    "hermes": Family("hermes", f"\n<tool_call>\n{CALL}\n</tool_call>"),
    "qwen3_coder": Family(
        "qwen3_coder",
        "\n<tool_call>\n<function=$name>\n$pairs</function>\n</tool_call>",
        pair="<parameter=$key>\n$value\n</parameter>\n",
        value=printed,
        marks=("<tool", "</tool", "<function", "</f", "<param", "</p"),
    ),
    "llama3_json": Family(
        "llama3_json", '{"name": $quoted, "parameters": $arguments}', "$content\n$calls", between="; "
    ),
    "mistral": Family("mistral", CALL[:-1] + ', "id": "a1b2c3d4e"}', "$content[TOOL_CALLS][$calls]", between=", "),
    "mistral 11": Family("mistral", "[TOOL_CALLS]$name[CALL_ID]a1b2c3d4e[ARGS]$arguments"),
    "deepseek": Family(
        "deepseek",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
        DEEPSEEK,
        between="\n",
    ),
    "deepseek 3.1": Family(
        "deepseek", "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>", DEEPSEEK
    ),
    "glm": GLM,
    "glm 4.7": replace(GLM, call=GLM.call.replace("\n", ""), pair=GLM.pair.replace("\n", "")),
    "pythonic": PYTHONIC,
    "lfm2": replace(
        PYTHONIC,
        parser="lfm2",
        whole="$content<|tool_call_start|>[$calls]<|tool_call_end|>",
        value=python_text,
        wrapped=("", ""),
        fit=unescaped,
    ),
    "gemma4": Family(
        "gemma4", "<|tool_call>call:$name$written<tool_call|>", value=gemma, marks=('<|"|>',), fit=sorted_keys
    ),
    "minimax_m2": Family(
        "minimax_m2",
        '<invoke name="$name">\n$pairs</invoke>\n',
        "$content\n<minimax:tool_call>\n$calls</minimax:tool_call>",
        pair='<parameter name="$key">$value</parameter>\n',
        marks=("<minimax", "</minimax", "<invoke", "</i", "<param", "</p"),
    ),
    "deepseek_v32": DSML,
    "deepseek_v4": replace(DSML, parser="deepseek_v4", whole=DSML.whole.replace("function_calls", "tool_calls")),
    "xlam": Family("xlam", CALL, "$content\n[$calls]", between=", "),
    "kimi_k2": Family(
        "kimi_k2",
        "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
        "$content<|tool_calls_section_begin|>$calls<|tool_calls_section_end|>",
    ),
    "phi4_mini": Family("phi4_mini", CALL, "${content}functools[$calls]", between=", "),
    "granite": Family("granite", CALL, "$content<|tool_call|>[$calls]", between=", "),
    "internlm2": Family("internlm2", f"<|action_start|><|plugin|>\n{CALL}<|action_end|>"),
    "seed_oss": Family(
        "seed_oss",
        "\n<seed:tool_call>\n<function=$name>\n$pairs</function>\n</seed:tool_call>",
        pair="<parameter=$key>$value</parameter>\n",
        marks=("<seed", "</seed", "<function", "</f", "<param", "</p"),
    ),
    "cohere": Family(
        "cohere",
        '    {"tool_call_id": "$number", "tool_name": $quoted, "parameters": $arguments}',
        "$content<|START_ACTION|>[\n$calls\n]<|END_ACTION|>",
        between=",\n",
    ),
    "command_r": Family(
        "command_r",
        '    {\n        "tool_name": $quoted,\n        "parameters": $arguments\n    }',
        "$content\nAction:\n```json\n[\n$calls\n]```",
        between=",\n",
    ),
    "granite_20b_fc": Family("granite_20b_fc", f"<function_call> {CALL}"),
    "gigachat3": Family("gigachat3", f"<|function_call|>{CALL}"),
    "apertus": Family(
        "apertus", "{$quoted: $arguments}", "$content<|tools_prefix|>[$calls]<|tools_suffix|>", between=", "
    ),
    "hunyuan_a13b": Family("hunyuan_a13b", CALL, "$content<tool_calls>[$calls]</tool_calls>", between=", "),
    "minimax_m1": Family("hunyuan_a13b", f"{CALL}\n", "$content\n<tool_calls>\n$calls</tool_calls>"),
    "hy_v3": Family(
        "hy_v3",
        "<tool_call:opensource>$name<tool_sep:opensource>\n$pairs</tool_call:opensource>\n",
        "$content<tool_calls:opensource>\n$calls</tool_calls:opensource>",
        pair="<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>$value</arg_value:opensource>\n",
        marks=("<tool", "</tool", "<arg", "</arg"),
    ),
    "minicpm5": Family(
        "minicpm5",
        '\n<function name="$name">$pairs</function>',
        pair='<param name="$key">$value</param>',
        value=cdata,
        marks=("<function", "</f", "<param", "</p", "]]>"),
    ),
    "nemotron": Family("nemotron", CALL, "$content<TOOLCALL>[$calls]</TOOLCALL>", between=", "),
    "functionary": Family("functionary", "<function=$name>$arguments</function>"),
    "functionary_v3_2": Family(
        "functionary_v3_2", ">>>$name\n$arguments", "all\n$content$calls", wrapped=("all\n", "")
    ),
    "kimi_k3": Family(
        "kimi_k3",
        '<|open|>call tool="$name" index="$number"<|sep|>$pairs<|close|>call<|sep|>',
        "$content<|open|>tools<|sep|>$calls<|close|>tools<|sep|>",
        pair='<|open|>argument key="$key" type="$kind"<|sep|>$value<|close|>argument<|sep|>',
        marks=("<|",),
    ),
    "muse_glimmer": Family(
        "muse_glimmer",
        '<|start|>assistant to=$name<|message|><atem:function_calls>\n<atem:invoke name="$name">\n'
        "$pairs</atem:invoke>\n</atem:function_calls>",
        " to=user<|message|>$content<|eom|>$calls<|eot|>",
        between="<|eom|>",
        pair='<atem:parameter name="$key">$value</atem:parameter>\n',
        marks=("<|", "<atem", "</atem"),
        wrapped=("to=user<|message|>", "<|eom|>"),
    ),
    "harmony": Family(
        "harmony",
        "<|start|>assistant<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments<|call|>",
        "$content".join(ANALYSIS) + "$calls",
        wrapped=ANALYSIS,
    ),
    "harmony history": Family(
        "harmony",
        "<|start|>assistant to=functions.$name<|channel|>commentary json<|message|>$arguments<|call|>",
        "$content".join(ANALYSIS) + "$calls",
        wrapped=ANALYSIS,
    ),
}
CODE_FAMILY = Family("code", "```$language\n$code\n```\n", "$content\n$calls")


def render(family: Family, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The turn as the family's template writes it."""
    written = []
    for number, (name, arguments) in enumerate(calls):
        pairs = []
        for key, value in arguments.items():
            text = isinstance(value, str)
            words = {"is_text": str(text).lower(), "kind": "string" if text else "object"}
            pairs.append(Template(family.pair).substitute(words, key=key, value=family.value(value)))
        words = {"language": "python" if name == "python" else "bash", "quoted": as_json(name)}
        words |= {"code": arguments.get("code") or arguments.get("command"), "arguments": as_json(arguments)}
        words |= {"pairs": family.between_pairs.join(pairs), "written": family.value(arguments)}
        written.append(Template(family.call).substitute(words, name=name, number=number))
    return Template(family.whole).substitute(content=content, calls=family.between.join(written))
