"""Errors of fetching and verifying weights."""

from __future__ import annotations


class WeightsRefused(Exception):
    """A manifest did not verify (names the tensor). The old weights stay loaded and the server stays up."""


class WeightsUnreachable(Exception):
    """Announced weights cannot be fetched now; the message says why. The old ones stay, the next pull tries again."""
