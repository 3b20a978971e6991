"""Which files, in which order, make up a version: a full one, then deltas, each on the one before.

    manifest of version 7 = its own file (a delta on 6) + "chain": [4 full, 5 delta on 4, 6 delta on 5]

A *state* is the content of all tensors, told by their checksums. A reader that holds a state goes on behind the link
that leaves it; version numbers alone would not do, because a queue that lost its newest writes gives them out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from penstock.weight_sync.errors import WeightsRefused

SERVED = ("http", "collective")
"""Transports under which the trainer serves its files, and manifests have URLs."""


@dataclass(frozen=True, slots=True)
class Link:
    """One file of a chain."""

    version: int
    base_version: int | None
    """The version that it changes; None where it is full."""
    place: str
    """Path, or URL under the `SERVED` transports."""
    bytes: int
    """Length of the file."""
    xxh3: str
    """Of the whole file."""
    state: str
    """`state_of` the tensors once it is applied."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def state_of(tensors: Iterable[Mapping[str, Any]]) -> str:
    """What all tensors hold, as 16 hex digits, from a manifest's ``tensors``. Their order does not matter."""
    lines = sorted(f"{t['name']} {t['dtype']} {list(t['shape'])} {t['xxh3']}" for t in tensors)
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def place_of(manifest: Mapping[str, Any]) -> str:
    """The manifest's own file. Raises `WeightsRefused` where it has none."""
    field = "url" if manifest.get("transport") in SERVED else "path"
    if field not in manifest:
        raise WeightsRefused(f"manifest has no field {field!r}")
    return str(manifest[field])


def links_of(manifest: Mapping[str, Any]) -> list[Link]:
    """All files of a version, the full one first. Raises `WeightsRefused` where they are no chain."""
    try:
        links = [Link(**link) for link in manifest.get("chain", ())]
        own = (manifest["version"], manifest.get("base_version"), place_of(manifest), manifest["bytes"])
        links.append(Link(*own, manifest.get("xxh3", ""), state_of(manifest["tensors"])))
    except (KeyError, TypeError) as error:
        raise WeightsRefused(
            f"version {manifest.get('version')}: the manifest's chain cannot be read: {error}"
        ) from error
    for before, link in zip([None, *links], links, strict=False):
        expected = before.version if before else None
        if link.base_version != expected:
            raise WeightsRefused(
                f"version {manifest['version']}: the link {link.version} is on {link.base_version},"
                f" before it is {expected}"
            )
    return links
