"""/v1/completions: the body → `CompletionRequest`, `Choice`s → the answer, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from penstock.gateway.wire.chat import ChoicesStream, frame_of, usage
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.schema import (
    HARMLESS,
    INT32,
    ONE_LOGPROB,
    PENALTIES,
    UNCONSTRAINED,
    BodyFields,
    ChoicesBody,
    Count,
    UnsupportedField,
    sampling_of,
)
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, InvalidRequest, SampledToken

Id = Annotated[int, Field(ge=0, le=INT32)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Id], Field(min_length=1)]
One = Field(min_length=1, json_schema_extra={"maxItems": 1})


class CompletionBody(ChoicesBody):
    """Fields of a completion request that are used; also its OpenAPI schema."""

    prompt: Text | Ids | Annotated[list[Text], One] | Annotated[list[Ids], One] = Field(
        description="One prompt: text, or exact ids."
    )
    max_tokens: Count | None = None
    logprobs: int | None = Field(
        None,
        ge=0,
        description="0 and 1 mean the same: of the sampled tokens. More is refused.",
        json_schema_extra={"maximum": 1},
    )
    best_of: Count | None = Field(None, description="Only as many as n.")


FIELDS = BodyFields(
    CompletionBody,
    harmless=HARMLESS,
    refused=PENALTIES
    | {
        "echo": UnsupportedField("an answer is what was sampled; the client has the prompt", (False,)),
        "suffix": UnsupportedField("no text is inserted, answers only continue the prompt", ("",)),
        "response_format": UnsupportedField(UNCONSTRAINED, ({"type": "text"},)),
    },
)


def parse_completion(body: Any) -> CompletionRequest:
    """Raises `InvalidRequest` naming the field. Without max_tokens the run's limit holds, not 16."""
    completion = FIELDS.read(body)
    n = completion.n or 1
    if completion.best_of not in (None, n):
        raise InvalidRequest("best_of", "is not supported here, other than n", "unsupported_parameter")
    if (completion.logprobs or 0) > 1:
        raise InvalidRequest("logprobs", f"above 1 is not supported here: {ONE_LOGPROB}", "unsupported_parameter")
    prompt: Any = completion.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest("prompt", "one prompt per request: each is its own answer", "unsupported_parameter")
        (prompt,) = prompt
    return CompletionRequest(
        api="completions",
        model=completion.model,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        n=n,
        sampling=sampling_of(completion, completion.max_tokens),
        stop=completion.stops,
        logprobs=completion.logprobs is not None,
        stream=bool(completion.stream),
        include_usage=completion.wants_usage,
    )


def completion_body(request: CompletionRequest, head: AnswerHead, choices: Sequence[Choice]) -> dict[str, Any]:
    """A ``text_completion``."""
    whole = [
        _choice(one.index, one.content, _logprobs(one.tokens, 0) if request.logprobs else None, one.finish_reason)
        for one in choices
    ]
    return {**frame_of(head, "text_completion"), "choices": whole, "usage": usage(head, choices)}


class CompletionStream(ChoicesStream):
    """The same calls as `ChatStream`."""

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        super().__init__(request, head, "text_completion")
        self._tokens: list[list[SampledToken]] = [[] for _ in range(request.n)]

    def start(self) -> bytes:
        """Nothing comes before the first text."""
        return b""

    def feed(self, index: int, delta: TextDelta) -> bytes:
        """Text that can be shown and tokens that were sampled meanwhile."""
        return self._chunk(index, delta, None) if delta.text or delta.tokens else b""

    def finish(self, choice: Choice) -> bytes:
        """The rest of a choice, and why it ended."""
        shown, sent = self._shown[choice.index], len(self._tokens[choice.index])
        self._done.append(choice)
        return self._chunk(choice.index, TextDelta(choice.content[shown:], choice.tokens[sent:]), choice.finish_reason)

    def _chunk(self, index: int, delta: TextDelta, finish_reason: str | None) -> bytes:
        offset = _characters(self._tokens[index])
        logprobs = _logprobs(delta.tokens, offset) if delta.tokens else None
        self._tokens[index].extend(delta.tokens)
        self._shown[index] += len(delta.text)
        return self._event(_choice(index, delta.text, logprobs, finish_reason))


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: Sequence[SampledToken], offset: int) -> dict[str, Any]:
    """`top_logprobs` is null: only the sampled token's is known. `offset`: characters before these tokens."""
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": None,
        "text_offset": [offset + _characters(tokens[:i]) for i in range(len(tokens))],
    }


def _characters(tokens: Sequence[SampledToken]) -> int:
    """Characters that have begun in these tokens; a byte that only continues with one does not count."""
    return sum(byte & 0xC0 != 0x80 for one in tokens for byte in one.raw)
