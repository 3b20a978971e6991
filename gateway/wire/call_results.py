"""Calls and their results in a conversation: as strict as the real APIs, which refuse one without the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.wire.types import Api, InvalidRequest


def check_calls(messages: Sequence[Mapping[str, Any]], api: Api) -> None:
    """Raises `InvalidRequest` for a call without a result, and for a result without a call.

    Results stand directly behind the calls that they answer, one for each; in /v1/responses anywhere behind them.
    """
    anywhere = api == "responses"
    called: set[str] = set()
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        field = "input" if anywhere else f"messages.{index}"
        if message["role"] == "tool":
            answered = message["tool_call_id"]
            if answered not in called:
                where = "before it" if anywhere else "of the message before the results"
                raise InvalidRequest(
                    field, f"is a result for {answered!r}, which is not a call {where}", "invalid_value"
                )
            open_calls.discard(answered)
            continue
        if not anywhere:
            _check_answered(open_calls, field)
            called = set()
        calls = {str(call["id"]) for call in message.get("tool_calls") or ()}
        called |= calls
        open_calls |= calls
    _check_answered(open_calls, "input" if anywhere else "messages")


def _check_answered(open_calls: set[str], field: str) -> None:
    if open_calls:
        names = ", ".join(sorted(open_calls))
        raise InvalidRequest(field, f"each call must be answered by a result, and has none: {names}", "invalid_value")
