"""How each family's chat template writes an assistant's turn with calls, in short; and how one call looks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
