"""Who may open an episode's paths: the run's token, and for this episode alone a key made from it.

handle = URL-safe base64 of ``FENCE EPISODE_ID``: names one lease, so it stops working when another one is given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

PREFIX = "/episodes/"


class BadHandle(Exception):
    """The path names no episode that there could be."""


def handle_of(episode_id: str, fence: int) -> str:
    return base64.urlsafe_b64encode(f"{fence} {episode_id}".encode()).rstrip(b"=").decode()


def lease_of(handle: str) -> tuple[str, int]:
    """(episode id, fence). Raises `BadHandle`."""
    try:
        text = base64.b64decode(handle + "=" * (-len(handle) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError) as error:
        raise BadHandle(f"{handle[:80]!r} is no handle of an episode") from error
    fence, _, episode_id = text.partition(" ")
    if not (fence.isdecimal() and len(fence) <= 18 and episode_id) or handle_of(episode_id, int(fence)) != handle:
        raise BadHandle(f"{handle[:80]!r} is no handle of an episode")
    return episode_id, int(fence)


def episode_key(token: str, handle: str) -> str:
    """The `api_key` of one episode."""
    return hmac.new(token.encode(), b"episode:" + handle.encode(), hashlib.sha256).hexdigest()


def opens(token: str, path: str, given: str) -> bool:
    """Whether `given` is the key of the episode that `path` lies in; compared in constant time."""
    if not path.startswith(PREFIX):
        return False
    handle = path[len(PREFIX) :].partition("/")[0]
    expected = episode_key(token, handle)
    return bool(handle) and hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))
