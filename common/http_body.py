"""Bodies for ASGI layers that answer some requests themselves and pass all others on, as they came."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive


async def read_body(receive: Receive) -> tuple[bytes, Message | HTTPException | None]:
    """(the whole body, None), or what came of it and the message or refusal that ended it."""
    parts: list[bytes] = []
    while True:
        try:
            message = await receive()
        except HTTPException as error:
            return b"".join(parts), error
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts), None


def replay_body(body: bytes, rest: Message | HTTPException | None, receive: Receive) -> Receive:
    """`receive` as it was before its body was read."""
    read: list[Message | HTTPException] = [{"type": "http.request", "body": body, "more_body": rest is not None}]
    if rest is not None:
        read.append(rest)

    async def again() -> Message:
        message = read.pop(0) if read else await receive()
        if isinstance(message, HTTPException):
            raise message
        return message

    return again
