"""Routes of sessions: open, look at, end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request

from penstock.sandbox.call_key import HEADER
from penstock.sandbox.server.callers import Caller
from penstock.sandbox.server.parts import Parts, parts_of
from penstock.sandbox.server.sessions import Entry, Wish
from penstock.sandbox.server.views import Ended, SessionView, StartRequest

router = APIRouter()


async def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


ThisServer = Annotated[Parts, Depends(parts_of)]
ThisCaller = Annotated[Caller, Depends(caller_of)]


async def entry_of(session_id: str, server: ThisServer, caller: ThisCaller) -> Entry:
    return server.sessions.get(session_id, caller)


ThisSession = Annotated[Entry, Depends(entry_of)]
Key = Annotated[
    str | None,
    Header(
        alias=HEADER,
        min_length=8,
        max_length=128,
        description="A request with a key that was used before is answered as the first was, not done again.",
    ),
]
LabelStart = Annotated[str, Query(max_length=256, description="Only sessions whose label begins so.")]


@router.post("/sessions", response_model=SessionView)
async def start(
    body: StartRequest, request: Request, server: ThisServer, caller: ThisCaller, key: Key = None
) -> SessionView:
    """A box of this caller's own: a warm one of that image, a fresh one, or one that another session gives back."""
    longest_s = server.config.server.queue_timeout_s
    wait_s = longest_s if body.wait_s is None else min(body.wait_s, longest_s)
    wish = Wish(caller, body.label, server.usual_image(body.image), body.ttl_s)
    with server.metrics.call("start"):
        entry = await server.sessions.start(wish, wait_s, key)
    if key is None and await request.is_disconnected():  # nobody knows its id; under a key it may be asked for again
        await server.sessions.end(entry)
    return _view(entry)


@router.get("/sessions", response_model=list[SessionView])
async def list_sessions(server: ThisServer, caller: ThisCaller, label: LabelStart = "") -> list[SessionView]:
    """This caller's sessions."""
    return [_view(entry) for entry in server.sessions.of(caller, label)]


@router.delete("/sessions", response_model=Ended)
async def end_sessions(server: ThisServer, caller: ThisCaller, label: LabelStart) -> Ended:
    """End all of this caller's sessions whose label begins so: what a run that is over may have left."""
    entries = server.sessions.of(caller, label)
    for entry in entries:
        await server.sessions.end(entry)
    return Ended(ended=len(entries))


@router.get("/sessions/{session_id}", response_model=SessionView)
async def show(entry: ThisSession) -> SessionView:
    """What there is to know about it; to look is to use it, so its time starts anew."""
    entry.touch()
    return _view(entry)


@router.delete("/sessions/{session_id}", status_code=204)
async def end(session_id: str, server: ThisServer, caller: ThisCaller) -> None:
    """End the box and everything in it. A session that is gone already is no error."""
    entry = server.sessions.entries.get(session_id)
    if entry is not None and entry.caller is caller:
        await server.sessions.end(entry)


def _view(entry: Entry) -> SessionView:
    return SessionView(
        session_id=entry.session.session_id,
        label=entry.label,
        image=entry.image,
        ttl_s=entry.ttl_s,
        idle_s=entry.idle_s,
        age_s=entry.age_s,
    )
