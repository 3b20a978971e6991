"""A model's chat template as text: how a conversation opens, and what follows a reply.

The delta of a later turn is derived, not written by hand: a synthetic conversation that ends in a marked reply is
rendered with the new messages after it; what follows the mark is the turn's closing, the messages and the generation
prompt. Nothing between two turns can get lost that way, such as the newline that Qwen's templates put there.

    user, assistant MARK, tool … ──template──► …<|im_start|>assistant\\nMARK│<|im_end|>\\n<|im_start|>user\\n…
                                                                           └── after_reply ──────────────►
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

from penstock.agent_loops.errors import TemplateError

Message = Mapping[str, Any]
MARK = "REPLYMARKERQX"


class ChatTemplate:
    """Renders messages to text with the tokenizer's own template. `settings` reach the template as variables."""

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = dict(settings or {})
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; put one into its "
                "folder as chat_template.jinja, or use an instruction-tuned model"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool) -> str:
        """The conversation as text; `prompt` adds the opening of the next reply. Raises `TemplateError`."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._settings,
            )
        except (JinjaError, TypeError, KeyError, AttributeError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(f"the chat template refuses messages with roles {roles}: {error}") from error
        return text

    def after_reply(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """What the template writes after a reply: its closing, `messages`, and the opening of the next reply."""
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *messages]
        text = self.render(conversation, prompt=prompt)
        at = text.find(MARK)
        if at < 0:
            raise TemplateError("the chat template drops or changes the content of assistant messages")
        return text[at + len(MARK) :]

    def reply_with_call(self, tools: Sequence[Mapping[str, Any]], call: Mapping[str, Any]) -> str | None:
        """How the template itself writes a reply that is one tool call; None where it writes no calls."""
        user = {"role": "user", "content": "x"}
        opening = self.render([user], tools, prompt=True)
        asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", **call}]}
        try:
            closed = self.render([user, asked], tools, prompt=False)
        except TemplateError:
            return None
        return closed[len(opening) :] if closed.startswith(opening) else None
