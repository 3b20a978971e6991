"""Messages of /v1/chat/completions, and the plain dicts that a chat template takes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.gateway.wire.check import Wire, is_text
from penstock.gateway.wire.content import ContentPart, image_part, plain_content, text_part
from penstock.gateway.wire.types import Choice
from penstock.tools.parsers import ToolCall


class TextPart(ContentPart):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None
    """Taken and dropped."""

    @property
    def plain(self) -> dict[str, str]:
        return text_part(self.text)


class ImageUrl(Wire):
    url: str
    detail: str | None = None
    """Taken and dropped."""


class ImagePart(ContentPart):
    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def plain(self) -> dict[str, str]:
        return image_part(self.image_url.url)


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Wire):
    name: str
    arguments: str


class CallIn(Wire):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Taken and dropped: left over from streams."""


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: str | list[Part]
    name: str | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    tool_calls: list[CallIn] | None = None
    reasoning_content: str | None = None
    """Templates that know it render it; answers never have it."""
    name: str | None = None
    annotations: Any = None
    """Taken and dropped."""


class ToolMessage(Wire):
    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


MessageIn = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def plain_message(message: MessageIn, where: str, *, images: bool = False) -> dict[str, Any]:
    """As a chat template takes it. Raises `BadAsk` at `where` for an image that is not allowed."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": plain_content(message.content, f"{where}.content", images)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        return _plain_assistant(plain, message)
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def plain_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier answer; arguments that are no JSON object stay the text that they are."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(text: str) -> dict[str, Any] | str:
    """The object that `text` holds, if a template can write it down again; else `text`."""
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and is_text(written) else text


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as clients get them; `arguments_of` gives back the same object."""
    return json.dumps(call.arguments, ensure_ascii=False)


def message_of(choice: Choice) -> dict[str, Any]:
    """The message that comes back when a client sends this answer as a part of its next request, as it was given."""
    plain: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.calls:
        plain["tool_calls"] = [plain_call(one.call_id, one.name, arguments_text(one)) for one in choice.calls]
    return plain


def _plain_assistant(plain: dict[str, Any], message: AssistantMessage) -> dict[str, Any]:
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            plain_call(one.id, one.function.name, one.function.arguments) for one in message.tool_calls
        ]
    return plain
