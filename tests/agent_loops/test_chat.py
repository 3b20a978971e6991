"""Token exactness over real template forms, with token splits that no tokenizer would choose."""

from __future__ import annotations

import ast
import json
import re
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agent_loops.talking import TOOLS, USER, reply_of, say, split_anyhow

from penstock.agent_loops import AgentConfig, Budget, TemplateError
from penstock.agent_loops.chat import chat_of, new_budget, tools_problem, verify_template
from penstock.tools import ToolResult

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

plain_text = st.text(max_size=30).filter(lambda text: not any(word in text for word in ("<|", "think>")))
kept_by_qwen3 = plain_text.map(lambda text: f"<think>\nhm {text.strip()}.\n</think>\n\nSo {text.strip()} {CALL}")
many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
@many
@given(data=st.data())
def test_chat_contexts_extend_and_match_template(chat_for, template, data):
    chat = chat_for(template).for_episode(Budget(50, 100_000))
    history, segment = [USER], chat.start([USER], TOOLS)
    for _ in range(data.draw(st.integers(1, 3))):
        before = segment.context()
        reply = data.draw(kept_by_qwen3)
        sampled = split_anyhow(chat, reply, data.draw)
        closed = data.draw(st.booleans())
        if closed:
            sampled = [*sampled, chat.turn_end_id]
        say(segment, sampled)
        texts = data.draw(st.lists(plain_text, min_size=1, max_size=3))
        assert segment.observe(chat.render_tools([ToolResult(text) for text in texts]))
        after = segment.context()
        assert after[: len(before) + len(sampled)] == [*before, *sampled]
        history += [{"role": "assistant", "content": reply}, *({"role": "tool", "content": text} for text in texts)]
        assert chat.decode(after) == chat.template.render(history, TOOLS, prompt=True)


def test_todays_date_is_the_runs(tokenizer_for, tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen2_5")
    dated = "{{ strftime_now('%d %b %Y') if strftime_now is defined }}" + tokenizer.chat_template
    tokenizer_for(dated).save_pretrained(tmp_path)
    chat = chat_of(str(tmp_path), AgentConfig(date=date(2024, 7, 26), parser="hermes"))
    assert chat.template.render([USER], prompt=True).startswith("26 Jul 2024")


def test_a_date_that_is_not_the_runs_is_said(tokenizer_for, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = "{% set day = '%d %b %Y' %}{{ strftime_now(day) }}" + tokenizer_for("qwen2_5").chat_template
    tokenizer_for(own).save_pretrained(tmp_path)
    chat_of(str(tmp_path), AgentConfig(date=date(2024, 7, 26), parser="hermes"))
    assert "strftime_now(day), not the run's 2024-07-26" in caplog.text


def test_ids_of_canonical_replies_equal_those_of_the_whole_text(chat_for):
    chat = chat_for("qwen2_5").for_episode(Budget(5, 1000))
    segment = chat.start([USER], TOOLS)
    say(segment, [*chat.encode(CALL), chat.turn_end_id])
    segment.observe(chat.render_tools([ToolResult("46")]))
    history = [USER, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "46"}]
    assert segment.context() == chat.encode(chat.template.render(history, TOOLS, prompt=True))


def test_chat_tool_calls_none_if_cut_by_length(chat_for):
    chat = chat_for("qwen2_5")
    whole = reply_of([], CALL + "<|im_end|>")
    cut = reply_of([], CALL, "length")
    assert [(call.name, call.arguments) for call in chat.tool_calls(whole)] == [("calculator", {"expression": "12+34"})]
    assert chat.tool_calls(cut) == []


def test_chat_tool_arguments_get_schema_types(chat_for):
    from penstock.tools.parsers import get_parser

    chat = chat_for("qwen2_5")
    chat.parser = get_parser("glm")
    text = "<tool_call>calculator<arg_key>expression</arg_key><arg_value>46</arg_value></tool_call>"
    shown, other = chat.for_episode(Budget(5, 1000)), chat.for_episode(Budget(5, 1000))
    shown.start([USER], TOOLS)
    assert shown.tool_calls(reply_of([], text))[0].arguments == {"expression": "46"}
    assert other.tool_calls(reply_of([], text))[0].arguments == {"expression": 46}, "a guess, without schemas"


def test_a_model_folder_is_proven_by_its_path(tokenizer_for, tmp_path):
    tokenizer_for("qwen3").save_pretrained(tmp_path)
    assert verify_template(chat_of(str(tmp_path), AgentConfig()), TOOLS).conversations > 30
    with pytest.raises(TemplateError, match="no tokenizer in"):
        chat_of(str(tmp_path / "nothing"), AgentConfig())


@pytest.mark.parametrize(
    ("told", "further"), [([2, 0], (0,)), (2, ()), (None, ()), ([2, 10**6], ()), ([2, 381, 382], (381,))]
)
def test_stops_are_read_from_the_generation_config(tokenizer_for, tmp_path, told, further):
    """Those within the vocabulary."""
    tokenizer = tokenizer_for("qwen2_5")
    assert len(tokenizer) == 382
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    assert chat_of(str(tmp_path), AgentConfig()).stop_token_ids == (2, *further)


def test_chat_budget_is_that_of_its_settings(chat_for):
    assert new_budget(AgentConfig(max_turns=3, max_response_tokens=7)) == Budget(3, 7, 0)
    assert new_budget(AgentConfig(max_turns=3, max_response_tokens=7), 99) == Budget(3, 7, 99)
    usual = AgentConfig()
    assert chat_for().budget == Budget(usual.max_turns, usual.max_response_tokens)


DROPS_RESULTS = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{{ m.role + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
)
REFUSES_RESULTS = (
    "{{ tools | tojson }}{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools!') }}"
    "{%- endif %}{{ m.role + m.content + '<|im_end|>' }}{%- endfor %}"
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no chat template"),
        ("chatml", r"ignores tools \(not shown: calculator\)"),
        (DROPS_RESULTS, "ignores messages of role tool"),
        (REFUSES_RESULTS, "no tools!"),
        ("{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}", "special token"),
        (
            "{%- for m in messages %}\n{{ m.role }}{%- endfo %}<|im_end|>",
            r"chat template has a mistake in line 2: .*endfo",
        ),
        (
            "{%- for m in messages %}\n{{ m.foo.bar }}{%- endfor %}<|im_end|>",
            r"template of .* asks in line 2 for .*'foo'(?!.*roles)",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_by_its_fault(chat_for, text, problem):
    with pytest.raises(TemplateError, match=problem):
        verify_template(chat_for(text), TOOLS)


def test_verify_refuses_turn_dependent_delta(chat_for):
    text = "{{ '<tool_call>' ~ tools | tojson if tools else '' }}{%- for m in messages %}"
    text += "{{ loop.index0 ~ m.role ~ ':' ~ m.content ~ '<|im_end|>' }}"
    text += "{%- endfor %}{%- if add_generation_prompt %}assistant:{%- endif %}"
    with pytest.raises(TemplateError, match=r"the splice has .* the template") as caught:
        verify_template(chat_for(text), TOOLS)
    found = re.search(r"at character (\d+) the splice has (.+), the template (.+); nor can", str(caught.value))
    assert found is not None
    at, spliced, wanted = (ast.literal_eval(value) for value in found.groups())
    before = min(at, 30)  # up to 30 characters that agree lead to the first that does not
    assert spliced[:before] == wanted[:before]
    assert spliced[before] != wanted[before]


def test_chat_prompt_ids_and_counts_are_those_of_the_text(chat_for):
    chat = chat_for("qwen2_5")
    text = chat.template.render([USER], TOOLS, prompt=True)
    assert chat.decode(chat.prompt_ids([USER], TOOLS)) == text
    assert chat.count_tokens("12+34") == len(chat.encode("12+34")) > 1


def test_chat_encodes_as_the_tokenizer_does_whatever_was_set_on_it(chat_for):
    """`chat` asks the Rust tokenizer itself, which keeps what others had it set to: cuts, padding, split words."""
    chat = chat_for("qwen2_5")
    texts = [
        "<|im_start|>user\n 12 +34 \u00e4\u4e2d\n\n<|im_end|>",
        "",
        " a\u0000b ",
        chat.template.render([USER], TOOLS, prompt=True),
    ]
    plain = [chat.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert chat.rendering._backend is not None
    rust = chat.tokenizer.backend_tokenizer
    for leave in (
        lambda: rust.enable_truncation(max_length=3),
        lambda: rust.enable_padding(length=40),
        lambda: chat.tokenizer("12+34 and more", split_special_tokens=True),
    ):
        leave()
        assert [chat.encode(text) for text in texts] == plain
        assert [chat.decode(ids) for ids in plain] == [chat.tokenizer.decode(ids) for ids in plain]
    assert [chat.encode(text) for text in texts] == plain


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "\n", " "]) | st.text(max_size=12), max_size=6).map("".join)
)
def test_chat_encodes_any_text_as_the_tokenizer_does(chat_for, text):
    chat = chat_for("qwen2_5")
    assert chat.rendering._backend is not None
    assert chat.encode(text) == chat.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("direct", [True, False])
def test_chat_names_a_text_on_which_the_tokenizer_panics(chat_for, monkeypatch, direct):
    """The library's panic is a `BaseException`; an interrupt is one too, and passes."""
    chat, panic = chat_for("qwen2_5"), type("PanicException", (BaseException,), {})

    def raises(error):
        def encode(*_arguments, **_settings):
            raise error

        rust = SimpleNamespace(truncation=None, padding=None, encode_special_tokens=False, encode_batch_fast=encode)
        monkeypatch.setattr(chat.rendering, "_backend", rust if direct else None)
        monkeypatch.setattr(chat.tokenizer, "encode", encode)

    raises(panic("index out of bounds"))
    with pytest.raises(TemplateError, match="these 5 characters: index out of bounds"):
        chat.encode("12+34")
    raises(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        chat.encode("12+34")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "generation_config.json.*is not valid JSON: "),
        ("[2]", "generation_config.json.*is not a JSON object"),
        ('{"eos_token_id": "end"}', "eos_token_id in generation_config"),
    ],
)
def test_chat_names_a_model_file_that_cannot_be_read(tokenizer_for, tmp_path, text, problem):
    tokenizer_for("qwen2_5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(TemplateError, match=problem):
        chat_of(str(tmp_path), AgentConfig())


def test_chat_says_why_a_model_takes_no_tools(chat_for):
    assert tools_problem(chat_for("qwen2_5")) == ""
    assert "ignores tools" in tools_problem(chat_for("chatml"))


SHOWS_TOOLS_ANEW = (
    "{%- for m in messages %}{{ m.role ~ ':' ~ m.content }}{%- for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n' ~ c.function | tojson ~ '\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>' }}"
    "{%- if m.role == 'tool' and tools %}{{ tools | tojson }}{%- endif %}{%- endfor %}"
    "{{- tools | tojson if tools else '' }}{%- if add_generation_prompt %}assistant:{%- endif %}"
)


def test_chat_begins_a_segment_behind_repeated_tools(chat_for):
    found = verify_template(chat_for(SHOWS_TOOLS_ANEW), TOOLS)
    assert "shows tools again after a call" in found.unsupported["tool"]
    assert "tool" in found.renewing


def test_chat_begins_a_segment_behind_results_of_unknown_tools(chat_for):
    """Without tools at start, one of ours says what holds of their results."""
    found = verify_template(chat_for(SHOWS_TOOLS_ANEW))
    assert ([*found.unsupported], found.renewing, found.conversations) == (["tool"], {"tool"}, 6)
    assert verify_template(chat_for("qwen2_5")).unsupported == {}


def test_chat_begins_no_segment_of_a_rewritten_reply(chat_for):
    """Turns are numbered, and a reply is `said …`, which written again from its text would be `said said …`."""
    text = "{%- for m in messages %}{{ loop.index0 ~ m.role ~ (':said ' if m.role == 'assistant' else ':') }}"
    text += "{{ m.content ~ '<|im_end|>' }}"
    text += "{%- endfor %}{%- if add_generation_prompt %}assistant:{%- endif %}"
    found = verify_template(chat_for(text))
    assert (list(found.unsupported), found.renewing) == (["user"], frozenset())
    assert "after a reply no message of role user" in found.summary("keep")


def test_chat_does_not_repeat_an_end_that_was_sampled(chat_for):
    chat = chat_for("qwen2_5")
    delta = [*chat.render_tools([ToolResult("46")])]
    assert delta[0] == chat.turn_end_id
    assert [*chat.without_repeated_end(chat.turn_end_id, delta)] == delta[1:]
    assert [*chat.without_repeated_end(chat.encode("6")[0], delta)] == delta
    assert [*chat.without_repeated_end(chat.turn_end_id, [])] == []


def test_chat_without_a_parser_reads_text_and_shows_no_tools(tokenizer_for, tmp_path):
    tokenizer_for("chatml").save_pretrained(tmp_path)
    chat = chat_of(str(tmp_path), AgentConfig()).for_episode(Budget(5, 1000))
    assert chat.tool_calls(reply_of([], f"{CALL}<|im_end|>")) == []
    assert chat.start([USER]).context_len > 1
    with pytest.raises(TemplateError, match="calls"):
        chat.start([USER], TOOLS)
