"""The body of POST /v1/completions → `Ask`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from penstock.gateway.wire.check import Fields
from penstock.gateway.wire.common import HARMLESS, INT32, PENALTIES, ChoicesBody, Count, sampling_of
from penstock.gateway.wire.types import Ask, BadAsk

Id = Annotated[int, Field(ge=0, le=INT32)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Id], Field(min_length=1)]
One = Field(min_length=1, json_schema_extra={"maxItems": 1})


class CompletionBody(ChoicesBody):
    """What is used of a completion request; for routes to declare in OpenAPI."""

    prompt: Text | Ids | Annotated[list[Text], One] | Annotated[list[Ids], One] = Field(
        description="One prompt: text, or exact ids."
    )
    max_tokens: Count | None = None
    logprobs: int | None = Field(None, ge=0, le=1, description="0 and 1 mean the same: of the sampled tokens.")
    best_of: Count | None = Field(None, description="Only as many as n.")


FIELDS = Fields(
    CompletionBody,
    harmless=HARMLESS,
    refused=PENALTIES | {"echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},)},
)


def parse_completion(body: Any) -> Ask:
    """Raises `BadAsk` naming what is wrong or cannot be given. Without max_tokens the run's own limit holds, not 16."""
    completion = FIELDS.read(body)
    n = completion.n or 1
    if completion.best_of not in (None, n):
        raise BadAsk("best_of", "is not supported here, other than n", "unsupported_parameter")
    return Ask(
        api="completions",
        model=completion.model,
        prompt=_one_prompt(completion.prompt),
        n=n,
        sampling=sampling_of(completion, completion.max_tokens),
        stop=completion.stops,
        logprobs=completion.logprobs is not None,
        stream=bool(completion.stream),
        include_usage=completion.wants_usage,
    )


def _one_prompt(prompt: Any) -> str | tuple[int, ...]:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    if several and len(prompt) > 1:
        raise BadAsk("prompt", "one prompt per request: each is an answer of its own", "unsupported_parameter")
    one = prompt[0] if several else prompt
    return one if isinstance(one, str) else tuple(one)
