"""Public templates, each with the only parser that reads it: chosen, verified, and reading any call that is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent_loops.families import TEMPLATES
from tests.agent_loops.template_table import TOOLS, auto_chat, judge, main, templates_in
from tests.tools.parsers.families import sorted_keys, unescaped
from tests.tools.parsers.test_round_trip import TOOLS as CALLED
from tests.tools.parsers.test_round_trip import arguments

from penstock.agent_loops import ChatTokens, TemplateError
from penstock.agent_loops.chat import name_of, verify_template
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall, get_parser

PUBLIC = TEMPLATES / "public"
Fit = Callable[[dict[str, Any]], dict[str, Any]]


def exact(given_arguments: dict[str, Any]) -> dict[str, Any]:
    return given_arguments


def plain(given_arguments: dict[str, Any]) -> dict[str, Any]:
    """Words and numbers: these templates print values as they are, without quotes or without escapes."""
    kept = {key: value for key, value in given_arguments.items() if isinstance(value, str | int | float)}
    return {key: _words(value) if isinstance(value, str) else value for key, value in kept.items() if key != "mode"}


def _words(text: str) -> str:
    return "w x" + "".join(letter for letter in text if letter.isalnum())


def one_argument(given_arguments: dict[str, Any]) -> dict[str, Any]:
    """This template writes no comma between two."""
    return dict([*given_arguments.items()][:1])


def without_tags(given_arguments: dict[str, Any]) -> dict[str, Any]:
    """No value can hold the syntax's own marks."""
    return {key: value for key, value in given_arguments.items() if "<" not in repr(value)}


READERS: dict[str, tuple[str, Fit]] = {
    "deepseek_v32": ("deepseek_v32", without_tags),
    "deepseek_v4": ("deepseek_v4", without_tags),
    "gemma3_pythonic": ("pythonic", one_argument),
    "gemma4": ("gemma4", lambda given_arguments: sorted_keys(without_tags(given_arguments))),
    "granite_3_3": ("granite", exact),
    "internlm2": ("internlm2", exact),
    "kimi_k2": ("kimi_k2", exact),
    "lfm2_5": ("lfm2", unescaped),
    "llama3_2_pythonic": ("pythonic", plain),
    "llama4_pythonic": ("pythonic", plain),
    "minimax_m2": ("minimax_m2", without_tags),
    "phi4_mini": ("phi4_mini", exact),
    "seed_oss": ("seed_oss", without_tags),
    "toolace": ("pythonic", plain),
    "xlam_qwen": ("xlam", exact),
}
WRITES_OTHERWISE = {"granite_3_3", "phi4_mini"}
"""No calls, or old ones without the mark that the prompt asks for."""


@lru_cache
def chat_of(name: str) -> ChatTokens:
    return auto_chat(PUBLIC / f"{name}.jinja")


@pytest.mark.parametrize("name", READERS)
def test_public_template_is_proven_with_its_parser(name):
    chat = chat_of(name)
    assert name_of(chat.parser) == READERS[name][0]
    assert verify_template(chat, TOOLS).conversations >= 40


@pytest.mark.parametrize("name", [name for name in READERS if name not in WRITES_OTHERWISE])
@settings(max_examples=20)
@given(arguments=arguments)
def test_public_template_writes_what_its_parser_reads(name: str, arguments: dict[str, Any]) -> None:
    chat, fitted = chat_of(name), READERS[name][1](arguments)
    text = chat.template.reply_with_call(CALLED, ToolCall("write_file", fitted))
    (call,) = chat.parser.parse(text, CALLED).calls
    assert (call.name, repr(call.arguments), call.error) == ("write_file", repr(fitted), None)


@pytest.mark.parametrize("name", [name for name in READERS if name not in WRITES_OTHERWISE])
@settings(max_examples=20)
@given(data=st.data())
def test_a_cut_call_of_a_public_template_is_not_run(name: str, data: st.DataObject) -> None:
    chat = chat_of(name)
    text = chat.template.reply_with_call(CALLED, ToolCall("write_file", {"text": "a word"}))
    whole = chat.parser.parse(text, CALLED).calls
    cut = chat.parser.parse(text[: data.draw(st.integers(0, len(text)))], CALLED).calls
    assert [call for call in cut if call.error is None] in ([], [*whole])


def test_the_parser_that_a_prompt_asks_for_comes_before_one_that_reads_old_calls():
    chat = ChatTokens(chat_of("phi4_mini").tokenizer, get_parser("llama3_json"))
    with pytest.raises(TemplateError, match=r"llama3_json does not read .*set agent\.parser=phi4_mini"):
        verify_template(chat, TOOLS)


def test_the_table_counts_what_is_accepted(capsys):
    files = [PUBLIC / "xlam_qwen.jinja", PUBLIC / "seed_oss.jinja", TEMPLATES / "gemma.jinja"]
    assert main([str(file) for file in files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines[:-1]] == [
        ["public/xlam_qwen.jinja", "xlam"],
        ["public/seed_oss.jinja", "seed_oss"],
    ]
    assert lines[-1].startswith("2 of 2 templates")


def test_the_table_says_why_a_template_is_refused(tmp_path: Path):
    (tmp_path / "odd.jinja").write_text("{{ tools }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    (file,) = templates_in([tmp_path])
    assert judge(file).parser == ""
    assert judge(file).reason in judge(file).line()


KIMI = """{%- for tool in tools or [] %}<|im_system|>{{ tool | tojson }}<|im_end|>{%- endfor %}
{%- for m in messages %}<|im_{{ m.role }}|>
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{%- endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls %}{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}<|tool_calls_section_end|>{%- endif %}<|im_end|>{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>{%- endif %}"""
"""As Kimi K2's own: the name of a call stands in its id alone."""


def test_the_id_that_a_model_wrote_stands_beside_its_result(tmp_path: Path):
    (tmp_path / "kimi.jinja").write_text(KIMI)
    chat = auto_chat(tmp_path / "kimi.jinja")
    assert name_of(chat.parser) == "kimi_k2"
    assert verify_template(chat, TOOLS).rewritten == ()
    text = chat.template.reply_with_call(TOOLS, ToolCall("calculator", {"expression": "1"}))
    (call,) = chat.parser.parse(text.replace(":0", ":7")).calls
    assert (call.name, call.call_id, call.written_id) == ("calculator", "call_0", "functions.calculator:7")
    assert "## Return of functions.calculator:7\n4" in chat.decode(chat.render_tools([ToolResult("4")], [call]))


def test_the_ids_of_a_client_become_those_of_the_template(tmp_path: Path):
    (tmp_path / "kimi.jinja").write_text(KIMI)
    called = {"id": "call_abc", "type": "function", "function": {"name": "calculator", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    messages = [{"role": "user", "content": "x"}, said, {"role": "tool", "content": "4", "tool_call_id": "call_abc"}]
    text = auto_chat(tmp_path / "kimi.jinja").rendering.prompt_text(messages, TOOLS)
    assert "<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{}" in text
    assert "## Return of functions.calculator:0\n4" in text
