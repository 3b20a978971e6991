"""How each family's chat template writes an assistant's turn with calls, in short; and how one call looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

HERMES = """\
{{- content }}
{%- for call in calls %}
    {{- '\\n<tool_call>\\n{"name": ' + call.name | tojson }}
    {{- ', "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}"""
QWEN3_CODER = """\
{{- content }}
{%- for call in calls %}
    {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<parameter=' + key + '>\\n' }}
        {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}"""
LLAMA3 = """\
{{- content + '\\n' if content else '' }}
{%- for call in calls %}
    {{- '; ' if not loop.first else '' }}
    {{- '{"name": ' + call.name | tojson + ', "parameters": ' + call.arguments | tojson + '}' }}
{%- endfor %}"""
MISTRAL = """\
{{- content + '[TOOL_CALLS][' }}
{%- for call in calls %}
    {{- ', ' if not loop.first else '' }}
    {{- '{"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson + ', "id": "a1b2c3d4e"}' }}
{%- endfor %}
{{- ']' }}"""
MISTRAL_11 = """\
{{- content }}
{%- for call in calls %}
    {{- '[TOOL_CALLS]' + call.name + ('[CALL_ID]a1b2c3d4e' if loop.first else '') }}
    {{- '[ARGS]' + call.arguments | tojson }}
{%- endfor %}"""
DEEPSEEK = """\
{{- content + '<｜tool▁calls▁begin｜>' }}
{%- for call in calls %}
    {{- '\\n' if not loop.first else '' }}
    {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name }}
    {{- '\\n```json\\n' + call.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}"""
DEEPSEEK_31 = """\
{{- content + '<｜tool▁calls▁begin｜>' }}
{%- for call in calls %}
    {{- '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments | tojson + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}"""
GLM = """\
{{- content }}
{%- for call in calls %}
    {{- '\\n<tool_call>' + call.name }}
    {%- for key, value in call.arguments | items %}
        {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
        {{- value if value is string else value | tojson }}
        {{- '</arg_value>' }}
    {%- endfor %}
    {{- '\\n</tool_call>' }}
{%- endfor %}"""
GLM_47 = GLM.replace("'\\n<", "'<").replace("\\n<arg_value>", "<arg_value>")
HARMONY = """\
{{- '<|channel|>analysis<|message|>' + content + '<|end|>' }}
{%- for call in calls %}
    {{- '<|start|>assistant<|channel|>commentary to=functions.' + call.name }}
    {{- ' <|constrain|>json<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- endfor %}"""
HARMONY_HISTORY = """\
{{- '<|channel|>analysis<|message|>' + content + '<|end|>' }}
{%- for call in calls %}
    {{- '<|start|>assistant to=functions.' + call.name }}
    {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- endfor %}"""
PYTHONIC = """\
{{- '<think>' + content + '</think>\\n[' }}
{%- for call in calls %}
    {{- call.name + '(' }}
    {%- for key, value in call.arguments | items %}
        {{- key + '=' + value | tojson }}
        {{- ', ' if not loop.last else '' }}
    {%- endfor %}
    {{- ')' }}
    {{- ', ' if not loop.last else '' }}
{%- endfor %}
{{- ']' }}"""
QUOTED = PYTHONIC.replace("value | tojson", "'\"%s\"' | format(value)")
UNQUOTED = PYTHONIC.replace("value | tojson", "'%s' | format(value)")
LFM2 = """\
{%- macro written(value) %}
    {%- if value is string %}
        {{- "'" + value + "'" }}
    {%- else %}
        {{- value | tojson if value is mapping else value | string }}
    {%- endif %}
{%- endmacro %}
{{- content + '<|tool_call_start|>[' }}
{%- for call in calls %}
    {{- call.name + '(' }}
    {%- for key, value in call.arguments | items %}
        {{- key + '=' + written(value) }}
        {{- ', ' if not loop.last else '' }}
    {%- endfor %}
    {{- ')' }}
    {{- ', ' if not loop.last else '' }}
{%- endfor %}
{{- ']<|tool_call_end|>' }}"""
GEMMA4 = """\
{%- macro written(value) %}
    {%- if value is string %}
        {{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean %}
        {{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, inner in value | dictsort %}
            {{- (',' if not loop.first else '') + key + ':' + written(inner) }}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is none %}
        {{- 'null' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for inner in value %}
            {{- (',' if not loop.first else '') + written(inner) }}
        {%- endfor %}
        {{- ']' }}
    {%- else %}
        {{- value }}
    {%- endif %}
{%- endmacro %}
{{- content }}
{%- for call in calls %}
    {{- '<|tool_call>call:' + call.name + written(call.arguments) + '<tool_call|>' }}
{%- endfor %}"""
MINIMAX_M2 = """\
{{- content + '\\n<minimax:tool_call>\\n' }}
{%- for call in calls %}
    {{- '<invoke name="' + call.name + '">\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\\n' }}
    {%- endfor %}
    {{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}"""
DEEPSEEK_32 = """\
{{- content + '\\n\\n<｜DSML｜function_calls>\\n' }}
{%- for call in calls %}
    {{- '<｜DSML｜invoke name="' + call.name + '">\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
        {{- (value if value is string else value | tojson) + '</｜DSML｜parameter>\\n' }}
    {%- endfor %}
    {{- '</｜DSML｜invoke>\\n' }}
{%- endfor %}
{{- '</｜DSML｜function_calls>' }}"""
KIMI_K2 = """\
{{- content + '<|tool_calls_section_begin|>' }}
{%- for call in calls %}
    {{- '<|tool_call_begin|>functions.' + call.name + ':' + loop.index0 | string }}
    {{- '<|tool_call_argument_begin|>' + call.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}"""
XLAM = """\
{{- content + '\\n[' }}
{%- for call in calls %}
    {{- '{"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson + '}' }}
    {{- ', ' if not loop.last else '' }}
{%- endfor %}
{{- ']' }}"""
PHI4_MINI = XLAM.replace("\\n[", "functools[")
GRANITE = XLAM.replace("\\n[", "<|tool_call|>[")
INTERNLM2 = """\
{{- content }}
{%- for call in calls %}
    {{- '<|action_start|><|plugin|>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
    {{- '}<|action_end|>' }}
{%- endfor %}"""
SEED_OSS = """\
{{- content }}
{%- for call in calls %}
    {{- '\\n<seed:tool_call>\\n<function=' + call.name + '>\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<parameter=' + key + '>' + (value if value is string else value | tojson) + '</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</seed:tool_call>' }}
{%- endfor %}"""
COHERE = """\
{{- content + '<|START_ACTION|>[\\n' }}
{%- for call in calls %}
    {{- '    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": ' + call.name | tojson }}
    {{- ', "parameters": ' + call.arguments | tojson + '}' + (',\\n' if not loop.last else '\\n') }}
{%- endfor %}
{{- ']<|END_ACTION|>' }}"""
COMMAND_R = """\
{{- content + '\\nAction:\\n```json\\n[\\n' }}
{%- for call in calls %}
    {{- '    {\\n        "tool_name": ' + call.name | tojson + ',\\n        "parameters": ' }}
    {{- call.arguments | tojson + '\\n    }' + (',\\n' if not loop.last else '') }}
{%- endfor %}
{{- '\\n]```' }}"""
GRANITE_20B_FC = """\
{{- content }}
{%- for call in calls %}
    {{- '<function_call> {"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson + '}' }}
{%- endfor %}"""
GIGACHAT3 = GRANITE_20B_FC.replace("<function_call> ", "<|function_call|>")
APERTUS = """\
{{- content + '<|tools_prefix|>[' }}
{%- for call in calls %}
    {{- '{' + call.name | tojson + ': ' + call.arguments | tojson + '}' }}
    {{- ', ' if not loop.last else '' }}
{%- endfor %}
{{- ']<|tools_suffix|>' }}"""
HUNYUAN = XLAM.replace("\\n[", "<tool_calls>[").replace("']' }}", "']</tool_calls>' }}")
MINIMAX_M1 = """\
{{- content + '\\n<tool_calls>\\n' }}
{%- for call in calls %}
    {{- '{"name": ' + call.name | tojson + ', "arguments": ' + call.arguments | tojson + '}\\n' }}
{%- endfor %}
{{- '</tool_calls>' }}"""
GLM_PAIRS = """\
    {%- for key, value in call.arguments | items %}
        {{- '<arg_key:opensource>' + key + '</arg_key:opensource>\\n<arg_value:opensource>' }}
        {{- (value if value is string else value | tojson) + '</arg_value:opensource>\\n' }}
    {%- endfor %}"""
HY_V3 = f"""\
{{{{- content + '<tool_calls:opensource>\\n' }}}}
{{%- for call in calls %}}
    {{{{- '<tool_call:opensource>' + call.name + '<tool_sep:opensource>\\n' }}}}
{GLM_PAIRS}
    {{{{- '</tool_call:opensource>\\n' }}}}
{{%- endfor %}}
{{{{- '</tool_calls:opensource>' }}}}"""
MINICPM5 = """\
{{- content }}
{%- for call in calls %}
    {{- '\\n<function name="' + call.name + '">' }}
    {%- for key, value in call.arguments | items %}
        {{- '<param name="' + key + '">' }}
        {%- if value is string and ('<' in value or '&' in value or '\\n' in value) %}
            {{- '<![CDATA[' + value + ']]>' }}
        {%- else %}
            {{- value | string }}
        {%- endif %}
        {{- '</param>' }}
    {%- endfor %}
    {{- '</function>' }}
{%- endfor %}"""
NEMOTRON = XLAM.replace("\\n[", "<TOOLCALL>[").replace("']' }}", "']</TOOLCALL>' }}")
FUNCTIONARY = """\
{{- content }}
{%- for call in calls %}
    {{- '<function=' + call.name + '>' + call.arguments | tojson + '</function>' }}
{%- endfor %}"""
FUNCTIONARY_V3_2 = """\
{{- 'all\\n' + content }}
{%- for call in calls %}
    {{- '>>>' + call.name + '\\n' + call.arguments | tojson }}
{%- endfor %}"""
KIMI_K3 = """\
{{- content + '<|open|>tools<|sep|>' }}
{%- for call in calls %}
    {{- '<|open|>call tool="' + call.name + '" index="' + loop.index | string + '"<|sep|>' }}
    {%- for key, value in call.arguments | items %}
        {{- '<|open|>argument key="' + key + '" type="' + ('string' if value is string else 'object') + '"<|sep|>' }}
        {{- (value if value is string else value | tojson) + '<|close|>argument<|sep|>' }}
    {%- endfor %}
    {{- '<|close|>call<|sep|>' }}
{%- endfor %}
{{- '<|close|>tools<|sep|>' }}"""
MUSE_GLIMMER = """\
{{- ' to=user<|message|>' + content + '<|eom|>' }}
{%- for call in calls %}
    {{- '<|start|>assistant to=' + call.name + '<|message|><atem:function_calls>\\n' }}
    {{- '<atem:invoke name="' + call.name + '">\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<atem:parameter name="' + key + '">' + (value if value is string else value | tojson) }}
        {{- '</atem:parameter>\\n' }}
    {%- endfor %}
    {{- '</atem:invoke>\\n</atem:function_calls>' + ('<|eom|>' if not loop.last else '<|eot|>') }}
{%- endfor %}"""
CODE = """\
{{- content + '\\n' }}
{%- for call in calls %}
    {{- '```' + ('python' if call.name == 'python' else 'bash') + '\\n' }}
    {{- call.arguments.code or call.arguments.command }}
    {{- '\\n```\\n' }}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    parser: str
    template: str
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


FAMILIES = {
    "hermes": Family("hermes", HERMES),
    "qwen3_coder": Family("qwen3_coder", QWEN3_CODER, ("<tool", "</tool", "<function", "</f", "<param", "</p")),
    "llama3_json": Family("llama3_json", LLAMA3),
    "mistral": Family("mistral", MISTRAL),
    "mistral 11": Family("mistral", MISTRAL_11),
    "deepseek": Family("deepseek", DEEPSEEK),
    "deepseek 3.1": Family("deepseek", DEEPSEEK_31),
    "glm": Family("glm", GLM, ("<tool", "</tool", "<arg", "</arg")),
    "glm 4.7": Family("glm", GLM_47, ("<tool", "</tool", "<arg", "</arg")),
    "pythonic": Family("pythonic", PYTHONIC, wrapped=("<think>", "</think>")),
    "lfm2": Family("lfm2", LFM2, fit=unescaped),
    "gemma4": Family("gemma4", GEMMA4, ('<|"|>',), fit=sorted_keys),
    "minimax_m2": Family("minimax_m2", MINIMAX_M2, ("<minimax", "</minimax", "<invoke", "</i", "<param", "</p")),
    "deepseek_v32": Family("deepseek_v32", DEEPSEEK_32, ("<｜", "</｜")),
    "deepseek_v4": Family("deepseek_v4", DEEPSEEK_32.replace("function_calls", "tool_calls"), ("<｜", "</｜")),
    "xlam": Family("xlam", XLAM),
    "kimi_k2": Family("kimi_k2", KIMI_K2),
    "phi4_mini": Family("phi4_mini", PHI4_MINI),
    "granite": Family("granite", GRANITE),
    "internlm2": Family("internlm2", INTERNLM2),
    "seed_oss": Family("seed_oss", SEED_OSS, ("<seed", "</seed", "<function", "</f", "<param", "</p")),
    "cohere": Family("cohere", COHERE),
    "command_r": Family("command_r", COMMAND_R),
    "granite_20b_fc": Family("granite_20b_fc", GRANITE_20B_FC),
    "gigachat3": Family("gigachat3", GIGACHAT3),
    "apertus": Family("apertus", APERTUS),
    "hunyuan_a13b": Family("hunyuan_a13b", HUNYUAN),
    "minimax_m1": Family("hunyuan_a13b", MINIMAX_M1),
    "hy_v3": Family("hy_v3", HY_V3, ("<tool", "</tool", "<arg", "</arg")),
    "minicpm5": Family("minicpm5", MINICPM5, ("<function", "</f", "<param", "</p", "]]>")),
    "nemotron": Family("nemotron", NEMOTRON),
    "functionary": Family("functionary", FUNCTIONARY),
    "functionary_v3_2": Family("functionary_v3_2", FUNCTIONARY_V3_2, wrapped=("all\n", "")),
    "kimi_k3": Family("kimi_k3", KIMI_K3, ("<|",)),
    "muse_glimmer": Family(
        "muse_glimmer", MUSE_GLIMMER, ("<|", "<atem", "</atem"), wrapped=("to=user<|message|>", "<|eom|>")
    ),
    "harmony": Family("harmony", HARMONY, wrapped=("<|channel|>analysis<|message|>", "<|end|>")),
    "harmony history": Family("harmony", HARMONY_HISTORY, wrapped=("<|channel|>analysis<|message|>", "<|end|>")),
}
CODE_FAMILY = Family("code", CODE)

_JINJA = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
_JINJA.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)


def render(family: Family, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The turn as the family's template writes it."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _JINJA.from_string(family.template).render(content=content, calls=named)
