from __future__ import annotations

import pytest
from tests.agent_loops.families import FAMILIES
from tests.agent_loops.talking import USER, answer

from penstock.agent_loops import AgentError, Budget, ChatTokens, TemplateError, continuity
from penstock.agent_loops.chat import verify_template

AGAIN = {"role": "user", "content": "Sure?"}
THINKING = "<think>\nAdd them.\n</think>\n\n46"


def chat_with(policy: str, name: str = "qwen3") -> ChatTokens:
    return FAMILIES[name].chat(thinking_history=policy).for_episode(Budget(20, 10_000))


def test_strip_segment_begins_with_rendered_history():
    chat = chat_with("strip")
    segments = [chat.start([USER])]
    history = [USER]
    for _ in range(3):
        reply = answer(chat, segments[-1], THINKING)
        segments.append(chat.go_on(segments[-1], reply, [AGAIN]))
        history += [{"role": "assistant", "content": THINKING}, AGAIN]
        text = chat.decode(segments[-1].context())
        assert text == chat.template.render(history, prompt=True)
        assert "Add them." not in text
    answer(chat, segments[-1], "46")
    outputs = [segment.output() for segment in segments]
    assert [output.num_turns for output in outputs] == [1, 1, 1, 1]
    told = continuity(outputs, chat.decode)
    assert (told["merged_turns"], told["mismatch/rewritten"]) == (0.0, 3)
    assert (told["mismatch/retokenised"], told["mismatch/retemplated"]) == (0, 0)
    assert told["repeated_tokens"] == sum(len(output.prompt_ids) for output in outputs[1:])


def test_a_reply_without_thinking_goes_on_and_so_do_tool_results():
    chat = chat_with("strip")
    segment = chat.start([USER])
    assert chat.go_on(segment, answer(chat, segment, "46"), [AGAIN]) is segment
    reply = answer(chat, segment, THINKING)
    assert chat.go_on(segment, reply, [{"role": "tool", "content": "46"}]) is segment
    assert continuity([segment.output()], chat.decode)["merged_turns"] == 1.0


def test_out_of_turns_no_further_segment_is_begun():
    chat = FAMILIES["qwen3"].chat(thinking_history="strip").for_episode(Budget(1, 10_000))
    segment = chat.start([USER])
    reply = answer(chat, segment, THINKING)
    assert chat.go_on(segment, reply, [AGAIN]) is segment
    assert segment.done


def test_go_on_refuses_unknown_turn():
    chat = chat_with("strip")
    segment = chat.start([USER])
    answer(chat, segment, THINKING)
    segment.observe(chat.render([AGAIN]))
    with pytest.raises(AgentError, match="every message"):
        chat.go_on(segment, answer(chat, segment, "46"), [AGAIN])


def test_calls_are_rendered_again_as_the_template_takes_them():
    chat = chat_with("strip", "deepseek")
    segment = chat.start([USER])
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{}\n```"
    reply = answer(chat, segment, f"<think>\nAdd them.\n</think>\n\n{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    after = chat.go_on(segment, reply, [{"role": "tool", "content": "46"}])
    assert after is not segment
    text = chat.decode(after.context())
    assert "Add them." not in text
    assert text.endswith(
        f"{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>46<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


def test_strip_refused_if_replies_cannot_be_rendered():
    with pytest.raises(TemplateError, match="template of channels"):
        verify_template(chat_with("strip", "gpt_oss"))
    assert verify_template(chat_with("strip")).conversations
