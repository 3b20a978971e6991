"""Public templates, each with the only parser that reads it: chosen, verified, and reading any call that is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.agent_loops.families import TEMPLATES
from tests.agent_loops.talking import USER, answer, say
from tests.agent_loops.template_table import TOOLS, auto_chat, judge, main, templates_in
from tests.tools.parsers.families import sorted_keys, unescaped
from tests.tools.parsers.test_round_trip import PROPERTIES, arguments

from penstock.agent_loops import Budget, ChatTokens, TemplateError
from penstock.agent_loops.chat import name_of, verify_template
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall, get_parser

PUBLIC = TEMPLATES / "public"
DESCRIBED = {key: {"description": "It.", "additionalProperties": {}, **value} for key, value in PROPERTIES.items()}
CALLED = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Writes.",
            "parameters": {"type": "object", "properties": DESCRIBED},
        },
    }
]
"""With all that some templates ask of a tool."""
OPENING = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"
"""Of a reply of Command R7B, as this template of it writes it."""
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


def without_line_breaks(given_arguments: dict[str, Any]) -> dict[str, Any]:
    """This template indents the lines of JSON, also those that end in a character which JSON leaves in texts."""
    return {key: value for key, value in given_arguments.items() if len(json.dumps(value, **RAW).splitlines()) == 1}


RAW: dict[str, Any] = {"ensure_ascii": False}
READERS: dict[str, tuple[str, Fit]] = {
    "apertus": ("apertus", exact),
    "command_r7b": ("cohere", exact),
    "command_r_plus": ("command_r", without_line_breaks),
    "deepseek_v32": ("deepseek_v32", without_tags),
    "deepseek_v4": ("deepseek_v4", without_tags),
    "gemma3_pythonic": ("pythonic", one_argument),
    "gemma4": ("gemma4", lambda given_arguments: sorted_keys(without_tags(given_arguments))),
    "functionary_3_1": ("functionary", exact),
    "functionary_3_2": ("functionary_v3_2", exact),
    "gigachat_3_1": ("gigachat3", exact),
    "granite_20b_fc": ("granite_20b_fc", exact),
    "granite_3_3": ("granite", exact),
    "hunyuan_a13b": ("hunyuan_a13b", exact),
    "hy_v3": ("hy_v3", without_tags),
    "internlm2": ("internlm2", exact),
    "kimi_k2": ("kimi_k2", exact),
    "kimi_k3": ("kimi_k3", without_tags),
    "lfm2_5": ("lfm2", unescaped),
    "llama3_2_pythonic": ("pythonic", plain),
    "llama4_pythonic": ("pythonic", plain),
    "minicpm5": ("minicpm5", without_tags),
    "minimax_m1": ("hunyuan_a13b", exact),
    "minimax_m2": ("minimax_m2", without_tags),
    "muse_glimmer": ("muse_glimmer", without_tags),
    "nemotron_nano_v2": ("nemotron", exact),
    "phi4_mini": ("phi4_mini", exact),
    "seed_oss": ("seed_oss", without_tags),
    "toolace": ("pythonic", plain),
    "xlam_qwen": ("xlam", exact),
}
WRITES_OTHERWISE = {"granite_3_3", "phi4_mini"}
"""No calls, or old ones without the mark that the prompt asks for."""
LONG = {"apertus", "functionary_3_1", "functionary_3_2", "gigachat_3_1", "granite_20b_fc", "hunyuan_a13b", "hy_v3"}
LONG |= {"minicpm5", "minimax_m1", "nemotron_nano_v2"}
"""Templates that write the syntax as `test_round_trip` does."""
WRITERS = [
    pytest.param(name, marks=pytest.mark.deep) if name in LONG else name
    for name in READERS
    if name not in WRITES_OTHERWISE
]
BEGINS_ANEW = {"command_r_plus", "hunyuan_a13b"}
"""The instruction to call tools stands behind the newest message; results read otherwise where tools are shown."""


@lru_cache
def chat_of(name: str) -> ChatTokens:
    return auto_chat(PUBLIC / f"{name}.jinja")


@pytest.mark.parametrize("name", READERS)
def test_public_template_is_proven_with_its_parser(name):
    chat = chat_of(name)
    assert name_of(chat.parser) == READERS[name][0]
    found = verify_template(chat, TOOLS)
    assert found.conversations >= 30
    assert ("tool" in found.renewing) == (name in BEGINS_ANEW)
    assert set(found.unsupported) <= {"user", *found.renewing}
    if not found.refused and set(found.unsupported) <= found.renewing:
        assert found.conversations == 6 + 45, "of users, and of 5 results after 3 kinds of replies in 3 places"


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20)
@given(arguments=arguments)
def test_public_template_writes_what_its_parser_reads(name: str, arguments: dict[str, Any]) -> None:
    chat, fitted = chat_of(name), READERS[name][1](arguments)
    text = chat.template.reply_with_call(CALLED, ToolCall("write_file", fitted))
    (call,) = chat.parser.parse(text, CALLED).calls
    assert (call.name, repr(call.arguments), call.error) == ("write_file", repr(fitted), None)


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
    assert lines[-1].endswith("0 of them with a new segment before results; 0 are refused")


def test_the_table_says_why_a_template_is_refused(tmp_path: Path):
    (tmp_path / "odd.jinja").write_text("{{ tools }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    (file,) = templates_in([tmp_path])
    assert judge(file).parser == ""
    assert judge(file).reason in judge(file).line()


def cohere_call(*numbers: int) -> str:
    written = [f'{{"tool_call_id": "{one}", "tool_name": "calculator", "parameters": {{}}}}' for one in numbers]
    return f"<|START_THINKING|>Plan.<|END_THINKING|><|START_ACTION|>[\n    {', '.join(written)}\n]<|END_ACTION|>"


def test_cohere_splice_is_what_the_template_writes_of_the_whole():
    chat = chat_of("command_r7b").for_episode(Budget(9, 9999))
    segment, history = chat.start([USER], TOOLS), [USER]
    for turn in range(3):
        calls = [ToolCall("calculator", {"expression": f"{turn}+{at}"}, f"id{turn}{at}") for at in range(turn + 1)]
        said = chat.template.call_message(calls)
        before = chat.rendering.prompt_text(history, TOOLS)
        written = chat.template.render([*history, said], TOOLS, prompt=False)
        assert written.startswith(before)
        reply = answer(chat, segment, written[len(before) :].removesuffix("<|END_OF_TURN_TOKEN|>"))
        results = [
            {"role": "tool", "content": f"{turn} {at}", "tool_call_id": f"id{turn}{at}"} for at in range(turn + 1)
        ]
        assert chat.go_on(segment, reply, [{"role": "tool", "content": one["content"]} for one in results]) is segment
        history += [said, *results]
        assert chat.decode(segment.context()) == chat.rendering.prompt_text(history, TOOLS)


@pytest.mark.parametrize("said", ["<|START_RESPONSE|>46<|END_RESPONSE|>", "<|START_RESPONSE|>46", "46"])
def test_cohere_closing_of_two_tokens_is_written_once(said):
    chat = chat_of("command_r7b").for_episode(Budget(9, 9999))
    segment = chat.start([USER])
    reply = answer(chat, segment, said)
    assert chat.stop_token_ids == (chat.turn_end_id,)
    chat.go_on(segment, reply, [USER])
    turn = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>What is 12+34?<|END_OF_TURN_TOKEN|>"
    assert chat.decode(segment.context()).endswith(f"{said}<|END_OF_TURN_TOKEN|>{turn}{OPENING}")
    cut = chat.for_episode(Budget(9, 9999)).start([USER])
    say(cut, chat.encode("46"))
    cut.observe(chat.render([USER]))
    assert f"46<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{turn}" in chat.decode(cut.context())


def test_template_opening_that_nobody_asked_for_is_cut():
    chat = chat_of("command_r7b")
    said = chat.template.render([USER, {"role": "assistant", "content": "46"}], prompt=False)
    assert said.endswith("46<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")
    assert chat.template.render([USER], prompt=True).endswith(f"<|END_OF_TURN_TOKEN|>{OPENING}")


def test_command_r_begins_segments_as_its_template_writes():
    chat = auto_chat(PUBLIC / "command_r_plus.jinja")
    found = verify_template(chat, TOOLS)
    assert {"tool", "user"} == set(found.unsupported) == found.renewing
    assert "before a message of role tool a new segment" in found.summary("keep")
    chat = chat.for_episode(Budget(9, 9999))
    segments = [chat.start([USER], TOOLS)]
    call = 'I look.\nAction:\n```json\n[\n    {"tool_name": "calculator", "parameters": {"expression": "12+34"}}\n]```'
    reply = answer(chat, segments[-1], call)
    with pytest.raises(TemplateError, match=r"take the next segment from go_on\(\)"):
        chat.render_tools([ToolResult("46")], chat.tool_calls(reply))
    segments.append(chat.go_on(segments[-1], reply, [{"role": "tool", "content": "46"}]))
    segments.append(
        chat.go_on(segments[-1], answer(chat, segments[-1], "It is 46."), [{"role": "user", "content": "?"}])
    )
    called = chat.template.call_message([ToolCall("calculator", {"expression": "12+34"})], "I look.")
    history = [USER, called, {"role": "tool", "content": "46"}]
    assert chat.decode(segments[1].context()[: -len(chat.encode("It is 46.")) - 1]) == chat.template.render(
        history, TOOLS, prompt=True
    )
    history += [{"role": "assistant", "content": "It is 46."}, {"role": "user", "content": "?"}]
    last = chat.decode(segments[2].context())
    assert last == chat.template.render(history, TOOLS, prompt=True)
    assert last.count("Write 'Action:'") == 1
    assert [one.output().num_turns for one in segments[:2]] == [1, 1]


@pytest.mark.parametrize("text", ["Sure?", "Sure? Ünï 数"])
def test_a_new_segment_draws_on_the_budget_of_its_messages(text):
    chat = auto_chat(PUBLIC / "command_r_plus.jinja")
    verify_template(chat, TOOLS)
    chat = chat.for_episode(Budget(9, 100))
    segment = chat.start([USER], TOOLS)
    reply = answer(chat, segment, "It is 46.")
    used = chat.budget.response_tokens
    after = chat.go_on(segment, reply, [{"role": "user", "content": text}])
    assert after is not segment
    assert chat.budget.response_tokens - used == len(chat.encode(f'"{text}"'))
    reply = answer(chat, after, "Yes.")
    assert chat.go_on(after, reply, [{"role": "user", "content": "word " * 100}]) is after
    assert after.done


def test_history_calls_have_ids_of_their_own():
    """Command R7B looks up by the id which call a result answers."""
    chat = copy.copy(chat_of("command_r7b"))
    chat.renewing_roles = ("tool",)
    chat = chat.for_episode(Budget(9, 9999))
    segment = chat.start([USER], TOOLS)
    for numbers in ([0, 1], [2]):
        reply = answer(chat, segment, cohere_call(*numbers))
        segment = chat.go_on(segment, reply, [{"role": "tool", "content": f"result {one}"} for one in numbers])
    text = chat.decode(segment.context())
    assert [text.index(f'"tool_call_id": "{one}",\n        "results"') for one in (0, 1, 2)] == sorted(
        text.index(f'"tool_call_id": "{one}",\n        "results"') for one in (0, 1, 2)
    )
    assert all(f'"{one}",\n        "results": {{\n            "0": "result {one}"' in text for one in (0, 1, 2))


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
