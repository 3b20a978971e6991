"""Keys of the API: one or more for each owner, of which this process knows the digests alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.common import error_response, header

HEADER = b"x-api-key"
OPEN = ("/api/v1/healthz", "/api/v1/files/")
"""Paths without a key: the second has a signature in it."""


class BadKeys(ValueError):
    """Keys that cannot be used; the message names the owner, never the key."""


def parse_keys(text: str) -> dict[str, str]:
    """``NAME=KEY,NAME=KEY`` → digest of each key → its owner. Raises `BadKeys`."""
    owners: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        owner, _, key = part.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", owner):
            raise BadKeys("a key's owner has a name of letters, digits, '.', '_' and '-'")
        if not key.startswith("tml-") or len(key) < 20:
            raise BadKeys(f"the key of {owner} must begin with tml-, as Tinker's SDK wants it, and have 20 characters")
        if digest_of(key) in owners:
            raise BadKeys(f"{owner} has the key of {owners[digest_of(key)]}")
        owners[digest_of(key)] = owner
    if not owners:
        raise BadKeys("there is no key")
    return owners


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class RequireKey:
    """ASGI layer: 401 without a key in X-API-Key; ``request.state.owner`` is whose it is."""

    def __init__(self, app: ASGIApp, owners: Mapping[str, str]) -> None:
        self.app, self._owners = app, owners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OPEN):
            await self.app(scope, receive, send)
            return
        # What is looked up is a digest: the time that it takes says nothing about a key.
        owner = self._owners.get(digest_of(header(scope, HEADER).decode("utf-8", "surrogateescape")))
        if owner is None:
            message = "X-API-Key has no key of this server; set TINKER_API_KEY"
            await error_response(401, "x-api-key", message)(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)
