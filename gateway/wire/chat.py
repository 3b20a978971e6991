"""/v1/chat/completions: the body → `CompletionRequest`, `Choice`s → the answer, whole or as a stream.

A stream holds per choice, in any order among choices: role, text and token log-probabilities as they come, the rest of
the text, calls (whole, one chunk each), finish_reason; then usage if requested, then ``[DONE]``. `AnswerReader` holds
back text that may become a stop string or a call, so the sum of a stream is the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.gateway.wire.answers import SSE_DONE, error_body, sse_data, token_logprobs
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.schema import (
    HARMLESS,
    NOT_HERE,
    NOT_THE_MODELS,
    ONE_LOGPROB,
    PENALTIES,
    TEXT_ONLY,
    UNCONSTRAINED,
    BodyFields,
    ChoicesBody,
    Count,
    Function,
    TextContent,
    ToolChoice,
    UnsupportedField,
    WireModel,
    check_names,
    check_tool_choice,
    is_text,
    plain_content,
    sampling_of,
    tool_schema,
)
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, InvalidRequest, SampledToken
from penstock.tools.parsers import ToolCall


class TextPart(TextContent):
    type: Literal["text"]
    prompt_cache_breakpoint: Any = None
    """Ignored."""


class ImageUrl(WireModel):
    url: str
    detail: str | None = None
    """Ignored."""


class ImagePart(WireModel):
    """An image, which `plain_content` refuses."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(WireModel):
    name: str
    arguments: str


class CallIn(WireModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Ignored: left over from streams."""


class SystemMessage(WireModel):
    role: Literal["system", "developer"]
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(WireModel):
    role: Literal["user"]
    content: str | list[Part]
    name: str | None = None


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    tool_calls: list[CallIn] | None = None
    reasoning_content: str | None = None
    """Rendered by templates that know it; answers never have it."""
    name: str | None = None
    annotations: Any = None
    """Ignored."""


class ToolMessage(WireModel):
    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


MessageIn = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def plain_message(message: MessageIn, where: str) -> dict[str, Any]:
    """The message for a chat template. Raises `InvalidRequest` at `where` for an image."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": plain_content(message.content, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                plain_call(one.id, one.function.name, one.function.arguments) for one in message.tool_calls
            ]
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def plain_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier answer; arguments that are no JSON object stay text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(text: str) -> dict[str, Any] | str:
    """The JSON object in `text`, if a template can write it again; else `text`."""
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and is_text(written) else text


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as JSON for clients; `arguments_of` returns the same object."""
    return json.dumps(call.arguments, ensure_ascii=False)


def message_of(choice: Choice) -> dict[str, Any]:
    """The message of this answer in a client's next request, unchanged by the client."""
    plain: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.calls:
        plain["tool_calls"] = [plain_call(one.call_id, one.name, arguments_text(one)) for one in choice.calls]
    return plain


class Tool(WireModel):
    type: Literal["function"]
    function: Function


class ChatBody(ChoicesBody):
    """Fields of a chat request that are used; also its OpenAPI schema."""

    messages: list[MessageIn] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Not OpenAI's; refused if they are not the run's agent.template_settings."
    )


FIELDS = BodyFields(
    ChatBody,
    harmless=HARMLESS | {"prediction"},
    refused=PENALTIES
    | {
        "top_logprobs": UnsupportedField(ONE_LOGPROB, (0,)),
        "response_format": UnsupportedField(UNCONSTRAINED, ({"type": "text"},)),
        "modalities": UnsupportedField(TEXT_ONLY, (["text"],)),
        "functions": UnsupportedField("it is the old name of tools", ([],)),
        "function_call": UnsupportedField("it is the old name of tool_choice", ("auto", "none")),
        "audio": UnsupportedField(TEXT_ONLY),
        "moderation": UnsupportedField(NOT_HERE),
        "reasoning_effort": UnsupportedField(NOT_THE_MODELS),
        "verbosity": UnsupportedField(NOT_THE_MODELS),
        "web_search_options": UnsupportedField(NOT_HERE),
    },
)


def parse_chat(body: Any) -> CompletionRequest:
    """Raises `InvalidRequest` naming the field."""
    chat = FIELDS.read(body)
    functions = [tool.function for tool in chat.tools or []]
    check_names(functions)
    check_tool_choice(chat.tool_choice)
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise InvalidRequest("max_tokens", "differs from max_completion_tokens; it is its old name", "invalid_value")
    return CompletionRequest(
        api="chat",
        model=chat.model,
        messages=tuple(plain_message(one, f"messages.{i}") for i, one in enumerate(chat.messages)),
        tools=tuple(tool_schema(function) for function in functions),
        template_settings=chat.chat_template_kwargs or {},
        tool_choice=chat.tool_choice or "auto",
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        n=chat.n or 1,
        sampling=sampling_of(chat, chat.max_completion_tokens or chat.max_tokens),
        stop=chat.stops,
        logprobs=bool(chat.logprobs),
        stream=bool(chat.stream),
        include_usage=chat.wants_usage,
    )


def chat_body(request: CompletionRequest, head: AnswerHead, choices: Sequence[Choice]) -> dict[str, Any]:
    """A ``chat.completion``."""
    whole = [
        {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": _logprobs(choice.tokens) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return {**frame_of(head, "chat.completion"), "choices": whole, "usage": usage(head, choices)}


class ChoicesStream:
    """The end of a stream, and the frame of its events, in chat and completions."""

    def __init__(self, request: CompletionRequest, head: AnswerHead, kind: str) -> None:
        self._request, self._head = request, head
        self._frame = frame_of(head, kind)
        self._shown = [0] * request.n
        """Characters of content sent, by choice."""
        self._done: list[Choice] = []

    def end(self) -> bytes:
        """Usage if requested, and the end of the stream."""
        if not self._request.include_usage:
            return SSE_DONE
        return sse_data({**self._frame, "choices": [], "usage": usage(self._head, self._done)}) + SSE_DONE

    def fail(self, status: int, message: str) -> bytes:
        """End an answer that broke off, in place of `end`: an error that clients raise, without ``[DONE]``."""
        return sse_data(error_body(status, message))

    def _event(self, choice: dict[str, Any]) -> bytes:
        more = {"usage": None} if self._request.include_usage else {}
        return sse_data({**self._frame, "choices": [choice], **more})


class ChatStream(ChoicesStream):
    """`start` once, `feed` and one `finish` per choice, `end` once; each returns bytes for the client, maybe none."""

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        super().__init__(request, head, "chat.completion.chunk")
        self._tokens = [0] * request.n

    def start(self) -> bytes:
        """The role of each choice, sent before the first token."""
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, opening) for index in range(self._request.n))

    def feed(self, index: int, delta: TextDelta) -> bytes:
        """Text that can be shown and tokens that were sampled meanwhile."""
        if not delta.text and not delta.tokens:
            return b""
        self._shown[index] += len(delta.text)
        self._tokens[index] += len(delta.tokens)
        return self._chunk(index, {"content": delta.text}, delta.tokens)

    def finish(self, choice: Choice) -> bytes:
        """The rest of a choice, its calls, and why it ended."""
        rest = TextDelta(choice.content[self._shown[choice.index] :], choice.tokens[self._tokens[choice.index] :])
        events = [self.feed(choice.index, rest)]
        events += [self._chunk(choice.index, {"tool_calls": [_call(one, i)]}) for i, one in enumerate(choice.calls)]
        events.append(self._chunk(choice.index, {}, finish_reason=choice.finish_reason))
        self._done.append(choice)
        return b"".join(events)

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[SampledToken] = (), finish_reason: str | None = None
    ) -> bytes:
        logprobs = _logprobs(tokens) if tokens else None
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})


def usage(head: AnswerHead, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts: of the context, once, and of all answers, closing ids included."""
    sampled = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": head.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": head.cached_tokens},
    }


def frame_of(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.answer_id, "object": kind, "created": head.created_s, "model": head.model}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall, position: int | None = None) -> dict[str, Any]:
    """`position` is for streams only."""
    where = {} if position is None else {"index": position}
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {**where, "id": call.call_id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    return {"content": token_logprobs(tokens), "refusal": None}
