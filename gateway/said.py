"""What a request says, whichever route it came by, for `History.place`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.history import History, Place, Tools
from penstock.gateway.normal import Message
from penstock.gateway.wire import Ask, BadAsk


@dataclass(frozen=True, slots=True)
class Said:
    messages: tuple[Message, ...]
    tools: Tools
    prompt: str | tuple[int, ...] | None
    instructed: bool

    def place(self, history: History) -> Place:
        """Raises `NotRenderable`."""
        if self.prompt is not None:
            return history.place_prompt(self.prompt)
        return history.place(self.messages, self.tools, instructed=self.instructed)


def said_by(ask: Ask, history: History) -> Said:
    """Raises `BadAsk` for a `previous_response_id` that is not of this episode."""
    if ask.prompt is not None:
        return Said((), (), ask.prompt, instructed=False)
    before: list[Message] = []
    if ask.instructions is not None:
        before.append({"role": "system", "content": ask.instructions})
    if ask.previous_response_id is not None:
        before += _conversation(ask.previous_response_id, history)
    return Said((*before, *ask.messages), ask.tools, None, instructed=ask.instructions is not None)


def _conversation(answer: str, history: History) -> list[Message]:
    turn = history.turns.get(f"{answer}.0")
    if turn is None:
        raise BadAsk("previous_response_id", f"{answer!r} is no response of this episode", "invalid_value")
    return turn.conversation()
