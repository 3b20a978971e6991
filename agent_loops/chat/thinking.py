"""Old thinking: kept token for token, or dropped where the template drops it, in a new segment.

keep    every id keeps its position; an episode is one segment
strip   where the template drops thinking before the new messages and there was some, a new segment begins with the
        history as the template writes it: as models such as Qwen3 are served
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from penstock.agent_loops.chat.continuation import ASKS
from penstock.agent_loops.chat.template import ChatTemplate, Message
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ParsedTurn

ThinkingHistory = Literal["keep", "strip"]
THOUGHT = re.compile(r"<think>\s*(?!</think>)\S.*?</think>", re.DOTALL)
PROBE = "THOUGHTMARKERQX"
THINKS: Message = {"role": "assistant", "content": f"<think>\n{PROBE}\n</think>\n\nI see."}


def thinks(text: str) -> bool:
    """Returns whether `text` contains a non-empty thought."""
    return THOUGHT.search(text) is not None


def written_again(template: ChatTemplate, parsed: ParsedTurn, text: str, special: re.Pattern[str]) -> Message:
    """A sampled reply as a message for the template; with a malformed call, as its text. White space around it is the
    template's.

    The ids of `parsed.calls` are those that the message gets.
    """
    if parsed.calls and template.call_form is not None and not any(call.error for call in parsed.calls):
        return template.call_message(parsed.calls, special.sub("", parsed.content))
    return {"role": "assistant", "content": special.sub("", text).strip()}


class OldThinking:
    """The treatment of the thinking of earlier replies by a template; determined once per kind of new message."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._dropped: dict[tuple[str, ...], bool] = {}

    def is_dropped_before(self, messages: Sequence[Message]) -> bool:
        """The template leaves out the thinking of the reply before such messages; False if it refuses them."""
        roles = tuple(dict.fromkeys(str(message.get("role")) for message in messages))
        if roles not in self._dropped:
            self._dropped[roles] = self._drops(roles)
        return self._dropped[roles]

    def check_strip(self) -> None:
        """Raises `TemplateError` where histories with thinking cannot be rendered again."""
        try:
            text = self._template.render([ASKS, THINKS, ASKS], prompt=True)
        except TemplateError as error:
            raise TemplateError(f"thinking_history: strip cannot be used with this chat template: {error}") from error
        if "I see." not in text:
            raise TemplateError("thinking_history: strip cannot be used: the chat template drops what follows thinking")
        if "<|channel|>" in text:
            raise TemplateError(
                "thinking_history: strip cannot be used with a template of channels (gpt-oss): a reply's text holds "
                "several messages, which this template takes apart only as fields; use keep"
            )

    def _drops(self, roles: tuple[str, ...]) -> bool:
        new = [{"role": role, "content": "x"} for role in roles]
        try:
            return PROBE not in self._template.render([ASKS, THINKS, *new], prompt=True)
        except TemplateError:
            return False
