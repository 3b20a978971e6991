"""What can go wrong beside the box itself."""

from __future__ import annotations


class SweTaskError(Exception):
    """The task or its environment is broken (row, snapshot, hidden tests, image): never the model's fault."""


class PatchError(ValueError):
    """A patch that does not fit its snapshot, or that no patch can be made from what the box holds."""
