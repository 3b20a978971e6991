"""A written conversation as the segments that an episode of it would hold, for supervised fine-tuning.

    messages   system, user │ assistant │ tool │ assistant          tools: schemas that the prompt shows
    segment    prompt       │ sampled   │ fed  │ sampled            mask  1…1 │ 0…0 │ 1…1

Prompts, results and the ends of turns go through `Conversation`, as in an episode; under ``thinking_history: strip`` a
history that the template rewrites begins a new segment. A reply is what the model's own template writes for it, between
the opening that a prompt ends with and the id that ends a reply. A template whose written replies do not lie between
these two is refused: the model would learn other tokens than it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.images import parts_of
from penstock.agent_loops.chat.template import Message, Tools, first_difference
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.errors import AgentError, TemplateError
from penstock.agent_loops.segment import Budget
from penstock.rollout_server import Generation
from penstock.transfer_queue import Segment

UNBOUNDED = 1 << 30
SHOWN = 40


class BadDemonstration(AgentError):
    """A conversation cannot be trained on; the message says why."""


def segments_of(chat: ChatTokens, messages: Sequence[Message], tools: Tools = ()) -> list[Segment]:
    """`messages` in OpenAI's form, arguments of calls as objects; `chat` is verified with `tools`.

    Raises `BadDemonstration`, and `TemplateError` where the template refuses them.
    """
    replies = _replies(messages)
    if parts_of(messages):
        raise BadDemonstration("it has images, which this trainer would not see")
    chat = chat.for_episode(Budget(UNBOUNDED, UNBOUNDED))
    conversation = Conversation(chat, messages[: replies[0]], tools)
    for number, following in zip(replies, [*replies[1:], len(messages)], strict=True):
        new = messages[number + 1 : following]
        text, ids = _reply(chat, messages[: number + 1], tools, new)
        segment = conversation.segment
        before = segment.context()[-8:]  # what a tokenizer writes may depend on what stands before
        joined, written = chat.decode([*before, *ids]), chat.decode(before) + text
        if joined != written:
            raise TemplateError(
                f"the tokenizer cannot split prompt and reply: joined they read {joined[-SHOWN:]!r}, and the chat "
                f"template writes {written[-SHOWN:]!r}"
            )
        reply = Generation(ids, [0.0] * len(ids), [(0, 0, len(ids))], "stop", text=text)
        segment.append_sampled(reply)
        if new:
            conversation.go_on(reply, new)
    return [*conversation.outputs()]


def _replies(messages: Sequence[Message]) -> list[int]:
    """Positions of the model's messages. Raises `BadDemonstration`."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers or numbers[0] == 0 or numbers[-1] != len(messages) - 1:
        roles = [message["role"] for message in messages]
        ends = f"begins with role {roles[0]} and ends with role {roles[-1]}" if roles else "is empty"
        raise BadDemonstration(
            f"a conversation begins with another role than assistant and ends with it; this one {ends}"
        )
    twice = next((one for one, other in pairwise(numbers) if other == one + 1), None)
    if twice is not None:
        raise BadDemonstration(f"messages {twice} and {twice + 1} are both of the model: join them")
    if any("weight" in messages[number] for number in numbers):
        raise BadDemonstration("`weight` of a message is not supported: every reply is trained on; leave it out")
    return numbers


def _reply(chat: ChatTokens, history: Sequence[Message], tools: Tools, new: Sequence[Message]) -> tuple[str, list[int]]:
    """Returns the text and the ids, end included, that the model has to sample for the last message of `history`.

    `new` comes after it. Raises `BadDemonstration`, and `TemplateError` where a written reply does not lie between the
    opening that a prompt ends with and the end of a reply.
    """
    opening = chat.rendering.prompt_text(history[:-1], tools)
    closed = chat.template.render(chat.template.fitted(history), tools, prompt=False)
    if not closed.startswith(opening):
        at = first_difference(opening, closed)
        raise TemplateError(
            "the chat template opens a written reply otherwise than one that is to be sampled: it writes "
            f"{closed[at : at + SHOWN]!r} where a prompt has {opening[at : at + SHOWN]!r}. A template_settings entry "
            "may change that (enable_thinking), or thinking that the conversations have to show"
        )
    written = closed[len(opening) :]
    at, word, end = max((written.rfind(word := chat.decode([one])), word, one) for one in chat.ends.stops)
    if at >= 0:
        text = written[:at]
        if behind := written[at + len(word) :].strip():
            raise TemplateError(f"the chat template writes {behind[:SHOWN]!r} behind the end of a reply, {word!r}")
    else:
        # The template closes nothing, as GLM's: what comes next ends the reply.
        text = written
        head = chat.render(new, tools).ids[0] if new else chat.turn_end_id
        end = head if head in chat.ends.stops else chat.turn_end_id
    ids = chat.encode(text)
    if ended := next((one for one in ids if one in chat.ends.stops), None):
        raise BadDemonstration(f"a reply spells {chat.decode([ended])!r}, which ends a turn")
    if not ids:
        raise BadDemonstration("a reply is empty")
    return text + chat.decode([end]), [*ids, end]
