"""A `Choice` → the ``response`` object of /v1/responses: one message, then one item per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.gateway.wire.ids import item_id
from penstock.gateway.wire.messages import arguments_text
from penstock.gateway.wire.types import Ask, Choice, Head, Token
from penstock.tools.parsers import ToolCall


def response_body(ask: Ask, head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """The whole answer. The API knows no `n`: there is one choice."""
    (choice,) = choices
    cut = choice.finish_reason == "length"
    return {
        **opening_body(ask, head, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(head, choice),
        "usage": _usage(head, choice),
    }


def opening_body(ask: Ask, head: Head, status: str = "in_progress") -> dict[str, Any]:
    """The ``response`` with no output yet."""
    return {
        "id": head.answer_id,
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "model": head.model,
        "error": None,
        "incomplete_details": None,
        "output": [],
        **ask.echo,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": None,
    }


def output_items(head: Head, choice: Choice) -> list[dict[str, Any]]:
    """A message, left out where there are calls and no text, then the calls."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    message = [message_item(head, [text_part(choice.content, choice.tokens)], status)]
    shown = message if choice.content or not choice.calls else []
    return shown + [call_item(head, call, i) for i, call in enumerate(choice.calls)]


def message_item(head: Head, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The one message of an answer."""
    item = item_id("msg", head.answer_id, 0)
    return {"id": item, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, tokens: Sequence[Token] = ()) -> dict[str, Any]:
    """`tokens` are empty where no log-probabilities were asked for."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(tokens)}


def call_item(head: Head, call: ToolCall, position: int, status: str = "completed") -> dict[str, Any]:
    """A call; without its arguments while it is ``in_progress``."""
    return {
        "id": item_id("fc", head.answer_id, position),
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": arguments_text(call) if status == "completed" else "",
        "status": status,
    }


def token_logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """`top_logprobs` is empty: only the sampled token's is known."""
    return [{"token": one.text, "bytes": list(one.raw), "logprob": one.logprob, "top_logprobs": []} for one in tokens]


def _usage(head: Head, choice: Choice) -> dict[str, Any]:
    sampled = len(choice.token_ids)
    return {
        "input_tokens": head.prompt_tokens,
        "input_tokens_details": {"cached_tokens": head.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": head.prompt_tokens + sampled,
    }
