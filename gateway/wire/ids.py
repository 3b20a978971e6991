"""Ids of answers and of what is inside them: the same whenever an answer is told again, from a journal for example."""

from __future__ import annotations

import hashlib

from penstock.gateway.wire.types import Api

_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}


def answer_id(api: Api, key: str) -> str:
    """The id of the answer that `key` names, episode and turn for example."""
    return _PREFIX[api] + _digest(key, 32)


def call_id(answer: str, index: int, position: int) -> str:
    """Of a tool call: by answer, choice and place in it."""
    return "call_" + _digest(f"{answer}/{index}/{position}", 24)


def item_id(kind: str, answer: str, position: int) -> str:
    """Of an output item of /v1/responses; `kind` is ``msg`` or ``fc``."""
    return f"{kind}_" + _digest(f"{answer}/{kind}/{position}", 32)


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
