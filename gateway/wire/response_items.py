"""Input items of /v1/responses, and the plain messages that a chat template takes.

A call is an item of its own there. In a conversation it belongs to the assistant's message before it:

    message(assistant) · function_call · function_call · function_call_output
    └──────────── one assistant message ────────────┘   └─── tool message ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.gateway.wire.check import Wire
from penstock.gateway.wire.content import ContentPart, image_part, plain_content, text_part
from penstock.gateway.wire.messages import plain_call

Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(ContentPart):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    """Taken and dropped, as the next two."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None

    @property
    def plain(self) -> dict[str, str]:
        return text_part(self.text)


class ImageItemPart(ContentPart):
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    """Taken and dropped."""

    @property
    def plain(self) -> dict[str, str]:
        return image_part(self.image_url)


ItemPart = Annotated[TextItemPart | ImageItemPart, Field(discriminator="type")]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    id: str | None = None
    """Taken and dropped, as the next two."""
    status: Status | None = None
    phase: str | None = None


class CallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    """Taken and dropped, as the next one."""
    status: Status | None = None


class OutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemPart]
    id: str | None = None
    """Taken and dropped, as the next one."""
    status: Status | None = None


class ReasoningItem(Wire):
    """Taken and dropped: answers here have none, another model's thoughts are not this one's."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def plain_items(items: Sequence[Item], *, images: bool = False) -> tuple[dict[str, Any], ...]:
    """Messages as a chat template takes them. Raises `BadAsk` for an image that is not allowed."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        if isinstance(item, MessageItem):
            messages.append(_plain_message(item, f"input.{i}.content", images))
        elif isinstance(item, CallItem):
            _add_call(messages, item)
        elif isinstance(item, OutputItem):
            content = plain_content(item.output, f"input.{i}.output", images)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    return tuple(messages)


def _plain_message(item: MessageItem, where: str, images: bool) -> dict[str, Any]:
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": plain_content(item.content, where, images)}


def _add_call(messages: list[dict[str, Any]], item: CallItem) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append(plain_call(item.call_id, item.name, item.arguments))
