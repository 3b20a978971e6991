"""Calls and their results in a conversation: as strict as the real APIs, which refuse one without the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.wire.types import Api, InvalidRequest

Messages = Sequence[Mapping[str, Any]]


def check_calls(messages: Messages, api: Api) -> None:
    """Raises `InvalidRequest` for a call without a result, and for a result without a call."""
    (_check_items if api == "responses" else _check_turns)(messages)


def _check_turns(messages: Messages) -> None:
    """Results stand directly behind the calls that they answer, one for each."""
    called: set[str] = set()
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _check_called(message["tool_call_id"], called, f"messages.{index}", "of the message before the results")
            open_calls.discard(message["tool_call_id"])
        else:
            _check_answered(open_calls, f"messages.{index}")
            called = set(_calls_of(message))
            open_calls = set(called)
    _check_answered(open_calls, "messages")


def _check_items(messages: Messages) -> None:
    """The same for items of the Responses API, whose outputs stand anywhere behind their calls."""
    called: set[str] = set()
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            _check_called(message["tool_call_id"], called, "input", "before it")
            open_calls.discard(message["tool_call_id"])
        called.update(_calls_of(message))
        open_calls.update(_calls_of(message))
    _check_answered(open_calls, "input")


def _calls_of(message: Mapping[str, Any]) -> list[str]:
    return [str(call["id"]) for call in message.get("tool_calls") or ()]


def _check_called(call_id: str, called: set[str], field: str, where: str) -> None:
    if call_id not in called:
        raise InvalidRequest(field, f"is a result for {call_id!r}, which is not a call {where}", "invalid_value")


def _check_answered(open_calls: set[str], field: str) -> None:
    if open_calls:
        names = ", ".join(sorted(open_calls))
        raise InvalidRequest(field, f"each call must be answered by a result, and has none: {names}", "invalid_value")
