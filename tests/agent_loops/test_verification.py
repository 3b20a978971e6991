"""What verification finds in templates that are made for it, and how replies end in templates that are odd."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.agent_loops.talking import TOOLS, USER

from penstock.agent_loops import ChatTokens, TemplateError
from penstock.agent_loops.chat import verify_template
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall, get_parser

CALLS = (
    "{%- for c in m.tool_calls or [] %}{{ '<tool_call>\\n' ~ c.function | tojson ~ '\\n</tool_call>' }}{%- endfor %}"
)
ASKED = "{%- if add_generation_prompt %}assistant:{%- endif %}"
END_OF_TEXT, CLOSED = "<|endoftext|>", "{{ '<|im_end|>' }}"
NO_NEW_SEGMENT = "nor can a new segment begin there"


def template(turn: str, before: str = "", after: str = "", asked: str = ASKED) -> str:
    """`turn` writes the message `m`."""
    return f"{before}{{%- for m in messages %}}{turn}{{%- endfor %}}{after}{asked}"


def plain(content: str = "m.content") -> str:
    return f"{{{{ m.role ~ ':' ~ {content} }}}}"


def measured(content: str = "m.content") -> str:
    """No delta fits: each turn tells how long the first message is."""
    return f"{{{{ messages[0].content | length ~ m.role ~ ':' ~ {content} }}}}"


@pytest.fixture
def odd(tokenizer_for: Callable[[str], Any]) -> Callable[..., ChatTokens]:
    return lambda text, **settings: ChatTokens(tokenizer_for(text), get_parser("hermes"), **settings)


SHOWN = "{{- tools | tojson if tools else '' }}"
AGAIN = "{%- if m.role == 'tool' and tools %}{{ tools | tojson }}{%- endif %}"
"""Results cannot be spliced: tools are shown anew behind them."""
REFUSED: dict[str, tuple[str, tuple[int, ...], Any, str]] = {
    "nothing follows": (
        template("{%- if m.content | length > 20 %}{{ raise_exception('too long') }}{%- endif %}" + plain() + CLOSED),
        (),
        (),
        "nothing can follow a reply: plain reply, then a user message: .*too long",
    ),
    "a stop inside a reply": (
        template(plain(f"('So{END_OF_TEXT} ' if m.role == 'assistant' else '') ~ m.content") + CLOSED),
        (0,),
        (),
        r"a reply does not end where the template ends it \(plain reply, then a user message\): at character .*"
        f"{NO_NEW_SEGMENT}: a reply cannot be written again from its text: 'So' would be its content",
    ),
    "a message that is not shown": (
        template(measured("('' if m.role == 'user' and m.content.isupper() else m.content)") + CLOSED),
        (),
        (),
        f"{NO_NEW_SEGMENT}: the chat template does not show a reply and a message of role user behind it",
    ),
    "a stop before the call": (
        template(plain() + CALLS.replace("'<tool_call>", f"'{END_OF_TEXT}<tool_call>") + CLOSED + AGAIN, after=SHOWN),
        (0,),
        TOOLS,
        f"shows tools again after a call.*{NO_NEW_SEGMENT}: a token that ends a reply stands inside a reply that calls",
    ),
    "another opening": (
        template(plain() + CALLS + CLOSED + AGAIN, after=SHOWN, asked=ASKED.replace("assistant", "reply")),
        (),
        TOOLS,
        f"{NO_NEW_SEGMENT}: the chat template opens a reply that it writes otherwise than one that it asks for",
    ),
    "words moved, bare calls refused": (
        template(
            "{%- if m.role == 'tool' and loop.previtem.tool_calls and not loop.previtem.content %}"
            "{{ raise_exception('say something') }}{%- endif %}" + measured() + CALLS + CLOSED,
            before=SHOWN,
        ),
        (),
        TOOLS,
        rf"\(call after words, then tool results\).*{NO_NEW_SEGMENT}: .*say something",
    ),
}


@pytest.mark.parametrize(("text", "stops", "tools", "problem"), REFUSED.values(), ids=REFUSED)
def test_verify_says_why_no_segment_can_go_on(odd, text: str, stops: tuple[int, ...], tools: Any, problem: str):
    with pytest.raises(TemplateError) as caught:
        verify_template(odd(text, stop_ids=stops), tools)
    assert re.search(problem, str(caught.value)), str(caught.value)


def test_verify_begins_a_segment_where_no_delta_closes(odd):
    """Here only the next message says how a reply is closed; the one that was tried first is short."""
    open_reply = "{%- if m.role != 'assistant' or loop.last or loop.nextitem.content | length < 5 %}"
    chat = odd(template(plain() + open_reply + CLOSED + "{%- endif %}{{ '\\n' }}"))
    found = verify_template(chat)
    problem = "the chat template closes a reply differently before these messages"
    assert (found.unsupported, found.renewing, found.conversations) == ({"user": problem}, {"user"}, 6)
    with pytest.raises(TemplateError, match=f"{problem}; take the next segment"):
        chat.render([USER])


def test_verify_begins_a_segment_where_a_call_is_closed_anew(odd):
    results = "{%- if m.role == 'tool' and loop.previtem.role == 'assistant' and not loop.previtem.tool_calls %}"
    results += "{{ raise_exception('results follow calls') }}{%- endif %}"
    closed = f"{{{{ '{END_OF_TEXT}' if m.tool_calls and not loop.last else '<|im_end|>' }}}}"
    found = verify_template(odd(template(results + plain() + CALLS + closed, before=SHOWN)), TOOLS)
    (problem,) = found.unsupported.values()
    assert re.search("closes a call with .*<.im_end.>', but writes .*<.endoftext.>tool:RESULT4711", problem)
    assert ([*found.unsupported], found.renewing) == (["tool"], {"tool"})


def test_a_template_that_takes_one_reply_alone_is_refused(odd):
    once = "{%- if messages | length > 2 %}{{ raise_exception('one reply') }}{%- endif %}"
    with pytest.raises(TemplateError, match="one reply"):
        odd(template(plain() + CLOSED, before=once))


def test_an_end_that_conversations_leave_out_is_a_stop(odd):
    """Such as an end of text that the template writes at the end alone; nothing can be spliced behind a reply."""
    last = "{%- if messages[-1].role == 'assistant' %}<|im_end|>{%- endif %}"
    chat = odd(template(plain() + "{{ '\\n' }}", after=last), stop_ids=(0, 2))
    assert chat.stop_token_ids == (2, 0)
    with pytest.raises(TemplateError, match="closes a reply differently before these messages"):
        chat.render([USER])


def test_ids_are_as_given_where_a_template_writes_no_calls(odd):
    chat = odd(template("{{ m.role ~ (m.tool_call_id or '') ~ ':' ~ m.content }}" + CLOSED))
    call = ToolCall("calculator", call_id="mine")
    assert chat.decode(chat.render_tools([ToolResult("46")], [call])) == "<|im_end|>toolmine:46<|im_end|>assistant:"
    theirs = {"role": "tool", "content": "46", "tool_call_id": "theirs"}
    assert chat.decode(chat.render([theirs], calls=[call])) == "<|im_end|>tooltheirs:46<|im_end|>assistant:"


def test_opening_tokens_are_those_of_a_reply(odd):
    chat = odd(template(plain() + CLOSED))
    assert chat.opening_tokens == len(chat.encode("assistant:")) > 0
    unasked = "{%- if not add_generation_prompt %}<|endoftext|>{%- endif %}"
    assert odd(template(plain() + CLOSED, after=unasked)).opening_tokens == 0


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("{%- if '<think>' in m.content %}{{ raise_exception('no thoughts') }}{%- endif %}" + plain(), "no thoughts"),
        (plain("m.content.split('</think>')[0]"), "the chat template drops what follows thinking"),
    ],
)
def test_strip_is_refused_where_thinking_cannot_be_told(odd, turn: str, problem: str):
    chat = odd(template(turn + CLOSED), thinking_history="strip")
    with pytest.raises(TemplateError, match=f"thinking_history: strip cannot be used.*{problem}"):
        verify_template(chat)


def test_strip_drops_nothing_before_a_refused_role(odd):
    first = "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{%- endif %}"
    chat = odd(template(first + plain("m.content.split('</think>')[-1]") + CLOSED), thinking_history="strip")
    context = chat.encode("user:What?<|im_end|>assistant:<think>hm</think>46")
    assert chat.begins_anew(context, [USER])
    assert not chat.begins_anew(context, [{"role": "system", "content": "Be brief."}])


def test_ids_of_a_client_stay_where_any_is_taken(odd):
    with_ids = CALLS.replace("</tool_call>'", "</tool_call>' ~ c.id")
    chat = odd(template("{{ m.role ~ (m.tool_call_id or '') ~ ':' ~ m.content }}" + with_ids + CLOSED))
    called = {"id": "call_abc", "type": "function", "function": {"name": "calculator", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [called]}
    result = {"role": "tool", "content": "46", "tool_call_id": "call_abc"}
    text = chat.decode(chat.prompt_ids([USER, asked, result], TOOLS))
    assert "\n</tool_call>call_abc<|im_end|>toolcall_abc:46<|im_end|>" in text
