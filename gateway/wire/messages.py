"""/v1/messages and /v1/messages/count_tokens of Anthropic: the body → `CompletionRequest`.

Content blocks become messages for the chat template, in their order; answers are in `messages_answers.py`:

    system                                      ──► a system message before all others
    user: tool_result · tool_result · text      ──► a tool message each, then a user message
    assistant: thinking · text · tool_use       ──► one assistant message; our thinking is part of its text
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from penstock.gateway.wire.schema import (
    NOT_HERE,
    UNCONSTRAINED,
    BodyFields,
    Count,
    Function,
    Name,
    SamplingBody,
    TextContent,
    ToolName,
    UnsupportedField,
    WireModel,
    check_names,
    check_tool_choice,
    ignored_fields,
    plain_content,
    sampling_of,
    tool_schema,
)
from penstock.gateway.wire.thinking_blocks import text_before
from penstock.gateway.wire.types import CompletionRequest, InvalidRequest


class TextBlock(TextContent):
    type: Literal["text"]
    text: Annotated[str, Field(min_length=1)]
    cache_control: Any = None
    """Ignored, as the next one."""
    citations: Any = None


class InlineImage(WireModel):
    type: Literal["base64"]
    media_type: str
    data: str


class LinkedImage(WireModel):
    type: Literal["url"]
    url: str


class ImageBlock(WireModel):
    """An image, which `plain_content` refuses."""

    type: Literal["image"]
    source: Annotated[InlineImage | LinkedImage, Field(discriminator="type")]
    cache_control: Any = None
    """Ignored."""


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Signature of our own answers, see `thinking_blocks`. Others' thinking is given to templates that know it."""


class RedactedThinkingBlock(WireModel):
    """Ignored: only the model that wrote it could read it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: Any = None
    """Ignored, as the next one."""
    caller: Any = None

    @property
    def call(self) -> dict[str, Any]:
        """Return the call in the form of a chat template."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


ResultPart = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    """Ignored: chat templates have no place for it, and the content says what went wrong."""
    cache_control: Any = None
    """Ignored."""


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(WireModel):
    role: Literal["user"]
    content: Annotated[str, Field(min_length=1)] | Annotated[list[UserBlock], Field(min_length=1)]


class AssistantTurn(WireModel):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]
    """May be empty, against the real API: an answer of the policy may be, and is sent back as it was."""


class SystemTurn(WireModel):
    """Stands anywhere between the others."""

    role: Literal["system"]
    content: str | list[TextBlock]


Turns = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def plain_turns(system: str | Sequence[TextBlock] | None, turns: Sequence[Turns]) -> tuple[Any, ...]:
    """Messages as a chat template takes them. Raises `InvalidRequest`."""
    messages: list[dict[str, Any]] = []
    if system:
        # A block of Claude Code's that differs from call to call and is not for the model.
        accounting = "x-anthropic-billing-header:"
        blocks = [] if isinstance(system, str) else [one.text for one in system if not one.text.startswith(accounting)]
        messages.append({"role": "system", "content": system if isinstance(system, str) else "".join(blocks)})
    for i, turn in enumerate(turns):
        where = f"messages.{i}.content"
        if isinstance(turn, AssistantTurn):
            messages.append(_assistant(turn.content, where))
        elif isinstance(turn, SystemTurn):
            messages.append({"role": "system", "content": plain_content(turn.content, where)})
        elif isinstance(turn.content, str):
            messages.append({"role": "user", "content": turn.content})
        else:
            messages += _user(turn.content, where)
    if isinstance(turns[-1], AssistantTurn):
        problem = "is the assistant's: an answer that the client began cannot be continued; ask in a user message"
        raise InvalidRequest(f"messages.{len(turns) - 1}", problem, "unsupported_parameter")
    return tuple(messages)


def _user(blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Results and the texts between them, one message each."""
    messages: list[dict[str, Any]] = []
    for is_result, group in itertools.groupby(enumerate(blocks), lambda pair: isinstance(pair[1], ToolResultBlock)):
        numbered = list(group)
        if is_result:
            for i, block in numbered:
                content = plain_content(block.content, f"{where}.{i}.content")
                messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
        else:
            first, parts = numbered[0][0], [block for _, block in numbered]
            messages.append({"role": "user", "content": plain_content(parts, where, first)})
    return messages


def _assistant(content: str | Sequence[Any], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    foreign: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        if isinstance(block, ToolUseBlock):
            calls.append(block.call)
        elif calls and not isinstance(block, RedactedThinkingBlock):
            problem = "stands after a tool_use block: calls are the end of an answer for a chat template"
            raise InvalidRequest(f"{where}.{i}", problem, "unsupported_parameter")
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            ours = text_before(block.thinking, block.signature)
            (foreign if ours is None else texts).append(block.thinking if ours is None else ours)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return (
        message
        | ({"reasoning_content": "".join(foreign)} if foreign else {})
        | ({"tool_calls": calls} if calls else {})
    )


# tools -------------------------------------------------------------------------------------------------------------
class CustomTool(WireModel):
    """Tools that Anthropic runs or defines itself (search, shells, editors, computers) are refused."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Any = None
    """Ignored, as the next two."""
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = Field(None, description="All tools are in the prompt.")
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema)


class ChoiceOfTools(WireModel):
    type: str = Field(json_schema_extra={"enum": ["auto", "none"]})
    name: str | None = Field(None, json_schema_extra={"not": {}})
    disable_parallel_tool_use: bool | None = Field(None, description="True: the answer ends after its first call.")


class OutputConfig(WireModel):
    effort: str | None = None
    """Ignored: the served model has no such setting, and Claude Code always sends one."""
    format: Any = Field(None, json_schema_extra={"not": {}})


# bodies ------------------------------------------------------------------------------------------------------------
UNREAD = frozenset(
    [
        *("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "thinking"),
        *("user_profile_id", "workspace_id"),
    ]
)
"""Ignored: bookkeeping of Anthropic's, and `thinking`: whether the model thinks is in its chat template."""
CLEARS_NOTHING: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
NOT_MESSAGES = {
    "container": UnsupportedField(NOT_HERE),
    "context_management": UnsupportedField("contexts only grow", CLEARS_NOTHING),
    "mcp_servers": UnsupportedField(NOT_HERE, ([],)),
    "output_format": UnsupportedField(UNCONSTRAINED),
}


VisibleStop = Annotated[str, Field(pattern=r"\S", description="Holds more than white space.")]


class MessagesPrompt(WireModel):
    """Fields that make the prompt."""

    model_config = ConfigDict(json_schema_extra=ignored_fields(UNREAD))

    model: Name
    messages: list[Turns] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ChoiceOfTools | None = None
    output_config: OutputConfig | None = None


class MessagesBody(SamplingBody, MessagesPrompt):
    """Fields of a request that are used; also its OpenAPI schema."""

    model_config = ConfigDict(json_schema_extra=ignored_fields(UNREAD))

    max_tokens: Count = Field(description="A bound: where agent.max_new_tokens is lower, that one holds.")
    stop_sequences: Annotated[list[VisibleStop], Field(max_length=64)] | None = None


FIELDS = BodyFields(MessagesBody, harmless=UNREAD, refused=NOT_MESSAGES)
OF_SAMPLING = frozenset(MessagesBody.model_fields) - frozenset(MessagesPrompt.model_fields)


class CountBody(MessagesPrompt):
    """Fields of /v1/messages/count_tokens; those of sampling are ignored, they do not change the count."""

    model_config = ConfigDict(json_schema_extra=ignored_fields(UNREAD | OF_SAMPLING))


COUNT_FIELDS = BodyFields(CountBody, harmless=UNREAD | OF_SAMPLING, refused=NOT_MESSAGES)


def parse_messages(body: Any) -> CompletionRequest:
    """Raises `InvalidRequest` naming the field."""
    prompt = FIELDS.read(body)
    return _request(
        prompt,
        sampling=sampling_of(prompt, prompt.max_tokens),
        limit_is_bound=True,
        stop=tuple(prompt.stop_sequences or ()),
        stream=bool(prompt.stream),
    )


def parse_count_tokens(body: Any) -> CompletionRequest:
    """The request whose prompt is to be counted. Raises `InvalidRequest` naming the field."""
    return _request(COUNT_FIELDS.read(body))


def _request(prompt: MessagesPrompt, **sampling: Any) -> CompletionRequest:
    functions = [tool.function for tool in prompt.tools or []]
    check_names(functions)
    choice = prompt.tool_choice or ChoiceOfTools(type="auto")
    check_tool_choice(choice.type if choice.name is None else choice)
    if prompt.output_config is not None and prompt.output_config.format is not None:
        raise InvalidRequest("output_config.format", f"is not supported here: {UNCONSTRAINED}", "unsupported_parameter")
    return CompletionRequest(
        api="messages",
        model=prompt.model,
        messages=plain_turns(prompt.system, prompt.messages),
        tools=tuple(tool_schema(function) for function in functions),
        tool_choice="none" if choice.type == "none" else "auto",
        parallel_tool_calls=choice.disable_parallel_tool_use is not True,
        include_usage=True,
        **sampling,
    )
