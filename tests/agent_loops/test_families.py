"""Exact tokens over the chat templates of eight families, with token splits that no tokenizer would choose."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent_loops.families import FAMILIES, THINKS_FIRST, Family, tokenizer_of
from tests.agent_loops.talking import PARAMETERS, TOOLS, USER, reply_of, say, split_anyhow

from penstock.agent_loops import AgentConfig, Budget, ChatTokens, TemplateError
from penstock.agent_loops.chat import chat_of, verify_template
from penstock.agent_loops.chat.template import MARK
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall, get_parser

THOUGHT = "<think>\nhm\n</think>\n\n"
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.takes_tools]
REWRITES_AFTER_TOOLS = {"qwen3_not_thinking"}
"""The generation prompt opens with an empty thought that the template leaves out of old turns."""
REWRITES_AFTER_USERS = {"qwen3", "qwen3_not_thinking"}

plain_text = st.text(max_size=30).filter(lambda text: not any(word in text for word in ("<", "[", "think>")))
reply_text = plain_text.map(lambda text: f"So {text.strip()}.")
some = settings(max_examples=25)


def written(chat: ChatTokens, history: list[Any], reply: Any, tools: Any = ()) -> str:
    """The reply as the template writes it, its end left out."""
    opening = chat.template.render(history, tools, prompt=True)
    closed = chat.template.render([*history, reply], tools, prompt=False)
    assert closed.startswith(opening)
    return closed[len(opening) :].removesuffix(chat.continuation.closing_of(closed))


@pytest.mark.parametrize("name", WITH_TOOLS)
@some
@given(data=st.data())
def test_families_tool_turns_splice_verbatim_ids(name, data):
    chat = FAMILIES[name].chat().for_episode(Budget(50, 100_000))
    history, segment = [USER], chat.start([USER], TOOLS)
    for number in range(data.draw(st.integers(1, 3))):
        call = ToolCall("calculator", {"expression": data.draw(plain_text)}, f"call0000{number}")
        reply = chat.template.call_message([call], THOUGHT if name == "qwen3" else "")
        before, delta = segment.context(), chat.render_tools([ToolResult(text := data.draw(plain_text))], [call])
        sampled = split_anyhow(chat, written(chat, history, reply, TOOLS), data.draw)
        sampled += delta[:1] * data.draw(st.integers(0, 1))
        say(segment, sampled)
        assert segment.observe(delta)
        assert segment.context()[: len(before) + len(sampled)] == [*before, *sampled]
        result = {"role": "tool", "content": text, "name": call.name, "tool_call_id": call.call_id}
        history += [reply, result]
        if name not in REWRITES_AFTER_TOOLS:
            assert chat.decode(segment.context()) == chat.template.render(history, TOOLS, prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
@some
@given(data=st.data())
def test_families_user_turns_splice_verbatim_ids(name, data):
    chat = FAMILIES[name].chat().for_episode(Budget(50, 100_000))
    history, segment = [USER], chat.start([USER])
    for _ in range(data.draw(st.integers(1, 3))):
        reply = {"role": "assistant", "content": data.draw(reply_text)}
        follow = {"role": "user", "content": data.draw(plain_text)}
        before, delta = segment.context(), chat.render([follow])
        sampled = split_anyhow(chat, written(chat, history, reply), data.draw) + delta[:1] * data.draw(
            st.integers(0, 1)
        )
        say(segment, sampled)
        assert segment.observe(delta)
        assert segment.context()[: len(before) + len(sampled)] == [*before, *sampled]
        history += [reply, follow]
        if name not in REWRITES_AFTER_USERS:
            assert chat.decode(segment.context()) == chat.template.render(history, prompt=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_turn_costs_its_delta_only(name, monkeypatch):
    chat = FAMILIES[name].chat().for_episode(Budget(200, 100_000))
    segment = chat.start([USER])
    encoded, rendered = [], []
    encode, render = chat.encode, chat.template.render
    monkeypatch.setattr(chat.rendering, "encode", lambda text: encoded.append(text) or encode(text))
    monkeypatch.setattr(
        chat.template, "render", lambda *args, **kwargs: rendered.append(text := render(*args, **kwargs)) or text
    )
    costs = []
    for _ in range(30):
        say(segment, [*encode("The answer is 46."), chat.turn_end_id])
        encoded.clear()
        rendered.clear()
        delta = chat.render([USER])
        assert segment.observe(delta)
        costs.append((sum(len(encode(text)) for text in encoded), sum(map(len, rendered))))
        assert costs[-1][0] == len(delta)
    assert set(costs) == {costs[0]}


@pytest.mark.parametrize(("parser", "refused"), [("hermes", True), ("qwen3_coder", False)])
def test_calls_behind_another_opening_are_checked(tmp_path, parser, refused):
    file = tmp_path / "thinks_first.jinja"
    file.write_text(THINKS_FIRST)
    chat = ChatTokens(tokenizer_of(file, "<|im_end|>"), get_parser(parser))
    if refused:
        with pytest.raises(TemplateError, match=r"agent\.parser=hermes does not read .*set agent\.parser=qwen3_coder"):
            verify_template(chat, TOOLS)
    else:
        assert verify_template(chat, TOOLS).conversations > 0


ASKS = """{%- for tool in tools or [] %}{{ tool.function.name }}{%- endfor %}{%- if tools %}{{ ' SHOWN ' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + CALLS + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
"""SHOWN tells the model how to write calls, CALLS is what the template writes of them."""
KIMI = "('<|call|>' + (m.tool_calls | tojson) + '<|end|>' if m.tool_calls else '')"


def default_chat(folder: Path, template: str, eos: str = "<|im_end|>") -> ChatTokens:
    """As a worker makes it of a model's folder, without a setting."""
    file = folder / "asks.jinja"
    file.write_text(template)
    tokenizer_of(file, eos).save_pretrained(folder / "model")
    return chat_of(str(folder / "model"), AgentConfig())


@pytest.mark.parametrize(
    ("template", "eos", "parser"),
    [
        *((FAMILIES[name].file.read_text(), FAMILIES[name].eos, FAMILIES[name].parser) for name in WITH_TOOLS),
        (THINKS_FIRST, "<|im_end|>", "qwen3_coder"),
        (ASKS.replace("SHOWN", "[TOOL_CALLS]").replace("CALLS +", ""), "<|im_end|>", "mistral"),
    ],
)
def test_the_only_parser_that_reads_the_calls_is_chosen(tmp_path, caplog, template, eos, parser):
    with caplog.at_level("INFO"):
        chat = default_chat(tmp_path, template, eos)
    assert type(chat.parser) is type(get_parser(parser))
    assert verify_template(chat, TOOLS).conversations > 0
    assert [line for line in caplog.messages if "agent.parser" in line and parser in line]


@pytest.mark.parametrize(
    ("template", "choices"),
    [
        (ASKS.replace("CALLS", KIMI), "mistral, deepseek"),
        (ASKS.replace("CALLS +", ""), "mistral, deepseek"),
        (ASKS.replace("SHOWN", "<tool_call>").replace("CALLS +", ""), "hermes, qwen3_coder, glm"),
    ],
)
def test_tools_are_refused_where_no_parser_can_be_chosen(tmp_path, template, choices):
    chat = default_chat(tmp_path, template)
    assert verify_template(chat).conversations > 0, "without tools there is nothing to read"
    for refused in (lambda: verify_template(chat, TOOLS), lambda: chat.start([USER], TOOLS)):
        with pytest.raises(TemplateError, match=rf"agent\.parser.*{choices}"):
            refused()


@pytest.mark.parametrize(("shown", "parser"), [("<tool_call>", "hermes"), ("", "code")])
def test_a_parser_that_is_set_is_proven_by_what_the_model_is_shown(tmp_path, shown, parser):
    file = tmp_path / "asks.jinja"
    file.write_text(ASKS.replace("SHOWN", shown).replace("CALLS +", ""))
    tokenizer = tokenizer_of(file, "<|im_end|>")
    assert verify_template(ChatTokens(tokenizer, get_parser(parser)), TOOLS).conversations > 0
    with pytest.raises(TemplateError, match=r"agent\.parser=mistral is not proven.*writes no tool calls"):
        verify_template(ChatTokens(tokenizer, get_parser("mistral")), TOOLS)


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if FAMILIES[name].parser != "hermes"])
def test_calls_of_another_format_are_refused(name):
    family = FAMILIES[name]
    chat = ChatTokens(tokenizer_of(family.file, family.eos), get_parser("hermes"))
    with pytest.raises(TemplateError, match=rf"agent\.parser=hermes .*set agent\.parser={family.parser}"):
        verify_template(chat, TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_verified_with_findings(name):
    search = {"type": "function", "function": {"name": "search", "description": "", "parameters": PARAMETERS}}
    proof = verify_template(FAMILIES[name].chat(), [*TOOLS, search] if FAMILIES[name].takes_tools else ())
    told = {
        "llama3": ("refused", "This model only supports single tool-calls at once!"),
        "gemma": ("refused", "System role not supported"),
        "gpt_oss": ("refused", "drops or changes the content of assistant messages"),
        "qwen3": ("rewritten", "reply with thinking, then a user message"),
        "glm": ("rewritten", "reply with thinking, then a user message"),
        "deepseek": ("rewritten", "call after thinking, then tool results"),
        "qwen3_not_thinking": ("rewritten", "call, then tool results"),
        "mistral": ("unsupported", "behind a reply what stood before it (plain reply, then a user message)"),
    }
    assert proof.conversations >= (40 if FAMILIES[name].takes_tools else 4)
    if name in told:
        kind, words = told[name]
        lines = getattr(proof, kind)
        assert any(words in line for line in (lines.values() if kind == "unsupported" else lines))
    else:
        assert (proof.rewritten, proof.refused, proof.unsupported) == ((), (), {})


@pytest.mark.parametrize(("tools", "case"), [(TOOLS, "plain reply, then"), ((), "under a system prompt, then")])
def test_families_unsupported_role_begins_a_segment(tools, case):
    """Mistral writes tools and the system prompt before the newest message of a user."""
    chat = FAMILIES["mistral"].chat()
    assert verify_template(chat, tools).renewing == {"user"}
    assert chat.render_tools([ToolResult("46")], [ToolCall("calculator", call_id="call00000")])
    chat, history = chat.for_episode(Budget(9, 999)), [{"role": "system", "content": "Be brief."}, USER]
    with pytest.raises(TemplateError, match=f"{case} a user message.*; take the next segment from go_on"):
        chat.render([USER])
    segment = chat.start(history, tools)
    say(segment, [*chat.encode(" 46"), chat.turn_end_id])
    after = chat.go_on(segment, reply_of(chat.encode(" 46</s>"), " 46</s>"), [USER])
    assert after is not segment
    history += [{"role": "assistant", "content": "46"}, USER]
    assert chat.decode(after.context()) == chat.template.render(history, tools, prompt=True)


def test_families_results_carry_name_or_id():
    gpt_oss = FAMILIES["gpt_oss"].chat()
    text = (
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant to=functions.calculator<|channel|>commentary json"
    )
    assert gpt_oss.tool_calls(reply_of([], text + '<|message|>{"expression": "1+2"}<|call|>'))
    assert gpt_oss.decode(gpt_oss.render_tools([ToolResult("3")])) == (
        '<|call|><|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    )
    mistral = FAMILIES["mistral"].chat()
    call = ToolCall("calculator", {}, "aB3dE6gH9")
    assert '"call_id": "aB3dE6gH9"' in mistral.decode(mistral.render_tools([ToolResult("3")], [call]))


CALL_WITH_ID = {
    "list": '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "1+2"}, "id": "Zx9yW8vU7"}]',
    "tokenizer 11": '[TOOL_CALLS]calculator[CALL_ID]Zx9yW8vU7[ARGS]{"expression": "1+2"}',
}


@pytest.mark.parametrize("syntax", CALL_WITH_ID)
def test_families_result_stands_under_the_id_that_the_model_wrote(syntax):
    chat = FAMILIES["mistral"].chat()
    reply = reply_of([], CALL_WITH_ID[syntax])
    (call,) = chat.tool_calls(reply)
    assert '"call_id": "Zx9yW8vU7"' in chat.decode(chat.render_tools([ToolResult("3")], [call]))
    segment = chat.start([USER], TOOLS)
    segment.remember([])
    told, result = chat._recorded_messages(segment, reply, [call], [{"role": "tool", "content": "3"}])
    assert (told["tool_calls"][0]["id"], result["tool_call_id"]) == ("Zx9yW8vU7", "Zx9yW8vU7")
    segment.remember([told, result])
    (again, _) = chat._recorded_messages(segment, reply, [call], [{"role": "tool", "content": "3"}])
    assert again["tool_calls"][0]["id"] == "call00002", "a template may look up by its id which call a result answers"


def test_families_parser_that_drops_the_written_id_is_refused_at_start():
    class Forgetful(type(get_parser("mistral"))):
        def parse(self, text, tools=()):
            turn = super().parse(text, tools)
            return replace(turn, calls=tuple(replace(call, written_id="") for call in turn.calls))

    tokenizer = FAMILIES["mistral"].chat().tokenizer
    with pytest.raises(TemplateError, match=r"Forgetful does not read this model's calls: set agent.parser=mistral"):
        verify_template(ChatTokens(tokenizer, Forgetful()), TOOLS)


def test_families_ambiguous_results_are_refused():
    chat = FAMILIES["gpt_oss"].chat()
    with pytest.raises(TemplateError, match="drops or changes"):
        chat.render_tools([ToolResult("1"), ToolResult("2")], [ToolCall("calculator"), ToolCall("calculator")])


def after(chat: ChatTokens, sampled: str, delta: list[int]) -> str:
    segment = chat.for_episode(Budget(9, 999)).start([USER])
    say(segment, chat.encode(sampled))
    prompt = len(segment.context()) - len(chat.encode(sampled))
    segment.observe(delta)
    return chat.decode(segment.context()[prompt:])


def test_a_tool_that_prints_our_own_mark_moves_nothing():
    for name in WITH_TOOLS:
        chat = FAMILIES[name].chat()
        text = f"before {MARK} {MARK}Q after"
        delta = chat.decode(chat.render_tools([ToolResult(text)], [ToolCall("calculator", call_id="call00000")]))
        other = chat.decode(chat.render_tools([ToolResult("OTHER")], [ToolCall("calculator", call_id="call00000")]))
        assert delta == other.replace("OTHER", text)


def test_families_defuse_turn_words():
    from tokenizers import AddedToken

    tokenizer = tokenizer_of(FAMILIES["qwen2_5"].file, "<|im_end|>")
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens([AddedToken("<turn>", special=False), AddedToken("<tool_call>", special=False)])
    copied.chat_template = copied.chat_template.replace("<|im_start|>", "<turn>")
    chat = ChatTokens(copied, get_parser("hermes"))
    said = chat.decode(chat.render([{"role": "user", "content": "<turn>system <tool_call> <|im_end|>"}]))
    assert said.count("<turn>") == 2
    assert "< turn>system <tool_call> < |im_end|>" in said


def test_families_sampled_end_is_kept():
    chat = FAMILIES["gpt_oss"].chat()
    assert [chat.decode([stop]) for stop in chat.stop_token_ids] == ["<|return|>", "<|call|>"]
    said = "<|channel|>final<|message|>46"
    follow = "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
    delta = chat.render([{"role": "user", "content": "Sure?"}])
    assert after(chat, f"{said}<|return|>", delta) == f"{said}<|return|>{follow}"
    assert after(chat, said, delta) == f"{said}<|end|>{follow}"


def test_families_next_turn_ends_reply():
    chat = FAMILIES["glm"].chat()
    user, tool = chat.render([USER]), chat.render_tools([ToolResult("46")])
    assert {chat.decode([stop]) for stop in chat.stop_token_ids} == {"<|user|>", "<|observation|>", "<|endoftext|>"}
    assert after(chat, "\nYes<|user|>", user).startswith("\nYes<|user|>\nWhat is")
    assert after(chat, "\nYes<|user|>", tool).startswith("\nYes<|user|><|observation|>\n<tool_response>")


def test_families_end_of_text_keeps_opening(tmp_path):
    file = tmp_path / "last.jinja"
    file.write_text(
        "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{%- if loop.last and m.role == 'assistant' %}"
        "{{ '<eos>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
        "{#- <|user|> <|system|> #}"
    )
    chat = Family("last", file, "<eos>", takes_tools=False).chat()
    assert verify_template(chat).conversations == 6
    assert after(chat, "Yes<eos>", chat.render([USER])) == "Yes<eos><|user|>What is 12+34?<|assistant|>"


def chat_with_stops(name: str, *words: str) -> tuple[ChatTokens, list[int]]:
    """As for a model whose ``generation_config.json`` names these words."""
    tokenizer = tokenizer_of(FAMILIES[name].file, FAMILIES[name].eos)
    ids = [tokenizer.convert_tokens_to_ids(word) for word in words]
    return FAMILIES[name].chat(stop_ids=ids), ids


def test_families_generation_config_stops():
    chat, (middle, text_end) = chat_with_stops("llama3", "<|eom_id|>", "<|endoftext|>")
    assert {chat.turn_end_id, middle, text_end} == set(chat.stop_token_ids)
    delta = chat.render([USER])
    assert chat.decode(delta).startswith("<|eot_id|><|start_header_id|>user")
    assert after(chat, "Yes<|eom_id|>", delta).startswith("Yes<|eom_id|><|start_header_id|>user")
    assert after(chat, "Yes<|endoftext|>", delta).startswith("Yes<|endoftext|><|eot_id|><|start_header_id|>user")


def test_a_stop_that_opens_the_next_turn_stands_for_no_closing():
    chat, (opening,) = chat_with_stops("qwen2_5", "<|im_start|>")
    assert chat.stop_token_ids == (chat.turn_end_id, opening)
    assert after(chat, "Yes<|im_start|>", chat.render([USER])).startswith("Yes<|im_start|><|im_end|>\n<|im_start|>user")


def test_families_glm_stops_are_unique():
    chat, ids = chat_with_stops("glm", "<|endoftext|>", "<|user|>", "<|observation|>")
    assert sorted(chat.stop_token_ids) == sorted(ids)


def client_turn(call_id: str, arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "calculator", "arguments": arguments}
    called = {"id": call_id, "type": "function", "function": function}
    asked = {"role": "assistant", "content": "", "tool_calls": [called]}
    return [USER, asked, {"role": "tool", "content": "46", "tool_call_id": call_id}]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_families_write_letters_of_arguments_as_they_are(name):
    """Not as escapes: a model would read another text than it is asked to write."""
    chat, arguments = FAMILIES[name].chat(), {"expression": "1 + ünï 数"}
    said = chat.template.render([USER, chat.template.call_message([ToolCall("calculator", arguments)])], prompt=False)
    prompt = chat.decode(chat.prompt_ids(client_turn("call_of_a_client_1", arguments), TOOLS))
    assert [arguments["expression"] in text for text in (said, prompt)] == [True, True]
    assert "46" in prompt
    assert '\\"expression' not in prompt


def test_families_take_arguments_that_are_text_already():
    chat = FAMILIES["deepseek"].chat()
    assert chat.template.call_form.arguments_as_text
    given, text = (
        chat.prompt_ids(client_turn("call_1", one), TOOLS) for one in ({"expression": "1"}, '{"expression": "1"}')
    )
    assert given == text


def test_families_keep_ids_that_the_template_takes():
    chat = FAMILIES["mistral"].chat()
    texts = [chat.decode(chat.prompt_ids(client_turn(one, {}), TOOLS)) for one in ("aB3dE6gH9", "call_of_a_client")]
    assert ["aB3dE6gH9" in text for text in texts] == [True, False]
