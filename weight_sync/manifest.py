"""The manifest of one policy version: which files to read, which tensors they hold, and what their bytes must be.

In Python it is a `Manifest`; through the queue and over HTTP it travels as plain data (`Manifest.as_dict`, read back by
`Manifest.parse`):

    {"version": 3, "transport": "shm", "path": "/dev/shm/…/weights-00000003.safetensors", "bytes": 4012345,
     "xxh3": "27…", "base_version": null, "chain": [], "deltas_follow": false,
     "tensors": [{"name": "lm_head.weight", "shape": [512, 64], "dtype": "float32", "xxh3": "9f…"}, …]}

A full version is one file. A delta has its base in ``base_version`` and the files before its own in ``chain``: a full
one, then deltas, each on the one before. ``tensors`` always describes the whole tensors. Under ``http`` and
``broadcast`` a ``url`` replaces the ``path``; under ``broadcast``, ``round`` is the URL whose last part names the
version's broadcast, and whose rest is where servers wait for the next one. Of a LoRA adapter, ``tensors`` are the
adapter's own, and ``adapter`` holds its settings and the state of the model folder that it is added to (`lora`).

A *state* identifies the content of all tensors by their checksums. A reader that holds a state continues after the file
that leads to it. Version numbers do not suffice: a queue that lost its newest writes assigns them again.

This module imports no torch: a sidecar reads manifests without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import xxhash

Transport = Literal["shm", "disk", "http", "broadcast"]
SERVED = ("http", "broadcast")
"""Transports under which the trainer serves its files, and manifests have URLs."""
FILE_NAME = re.compile(r"weights-(\d{8})(?:-e(\d+))?(\.delta)?\.safetensors")
"""A published version's file: version, epoch of the trainer that wrote it, whether it is a delta."""
LOCAL_NAME = re.compile(r"[0-9a-f]{16}-" + FILE_NAME.pattern)
"""A complete, verified file in a server's folder; other servers may fetch it from there."""


class WeightsRefused(Exception):
    """A version did not verify; the message names the tensor or file. The loaded weights stay, the server stays up."""


class WeightsUnreachable(Exception):
    """Announced weights cannot be fetched now; the message has the cause. The next pull tries again."""


class WeightsBroken(Exception):
    """A version that replaced the engine's weights in place did not come whole; the message has the cause.

    The engine holds no version. It is paused until it has loaded a whole one, which may be the same as before.
    """


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``float32`` for `torch.float32`."""
    xxh3: str
    """xxh3-64 of the raw bytes, row-major, as 16 hex digits."""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "xxh3": self.xxh3}


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a version: the full one, or a delta on the file before."""

    version: int
    base_version: int | None
    """The version that it changes; None for a full file."""
    place: str
    """Path, or URL under the `SERVED` transports."""
    bytes: int
    """Length of the file."""
    xxh3: str
    """Checksum of the whole file."""
    state: str
    """`state_of` the tensors once the file is applied."""

    @property
    def name(self) -> str:
        """Last part of `place`."""
        return self.place.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The settings of a version that is a LoRA adapter."""

    config: Mapping[str, Any]
    """`lora.AdapterConfig` as plain data; validated where the adapter is merged."""
    base: str
    """State of the model folder that it is added to."""


@dataclass(frozen=True)
class Manifest:
    """One version: its files, full one first and its own last, and its tensors."""

    transport: Transport
    files: tuple[ChainFile, ...]
    tensors: tuple[TensorEntry, ...]
    deltas_follow: bool = False
    """Servers keep a host copy: later versions may be deltas on this one."""
    adapter: AdapterSpec | None = None
    broadcast: str = ""
    """``URL/NAME``: this version's broadcast, and where servers wait for the next one; empty: there is none."""

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Manifest:
        """Validate plain data; unknown fields are ignored. Raises `WeightsRefused` naming what is missing or wrong."""
        if not isinstance(fields, Mapping):
            raise WeightsRefused(f"manifest is {fields!r:.100}, not a mapping")
        for name in ("version", "transport", "bytes", "tensors"):
            if name not in fields:
                raise WeightsRefused(f"manifest has no field {name!r}")
        version, transport = fields["version"], fields["transport"]
        if transport not in get_args(Transport):
            raise WeightsRefused(f"version {version}: the manifest's transport {transport!r} is unknown")
        place = _place_field(transport)
        if place not in fields:
            raise WeightsRefused(f"manifest has no field {place!r}")
        try:
            tensors = tuple(_parse_entry(entry) for entry in fields["tensors"])
            own = (version, fields.get("base_version"), fields[place], fields["bytes"], fields.get("xxh3", ""))
            chain = [ChainFile(**file) for file in fields.get("chain", ())]
            adapter = AdapterSpec(**fields["adapter"]) if "adapter" in fields else None
        except (TypeError, AttributeError) as error:
            raise WeightsRefused(f"version {version}: the manifest cannot be read: {error}") from error
        files = (*chain, ChainFile(*own, state_of(tensors)))
        try:
            _check_types(files, tensors, adapter)
        except TypeError as error:
            raise WeightsRefused(f"version {version}: {error}") from error
        _check_chain(files)
        return cls(
            transport, files, tensors, bool(fields.get("deltas_follow")), adapter, str(fields.get("round") or "")
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the queue and for HTTP; `parse` reads it back."""
        plain: dict[str, Any] = {
            "version": self.version,
            "transport": self.transport,
            _place_field(self.transport): self.place,
            "bytes": self.bytes,
            "xxh3": self.files[-1].xxh3,
            "base_version": self.base_version,
            "chain": [asdict(file) for file in self.files[:-1]],
            "deltas_follow": self.deltas_follow,
            "tensors": [entry.as_dict() for entry in self.tensors],
        }
        if self.adapter is not None:
            plain["adapter"] = {"config": dict(self.adapter.config), "base": self.adapter.base}
        return plain | ({"round": self.broadcast} if self.broadcast else {})

    @property
    def version(self) -> int:
        return self.files[-1].version

    @property
    def base_version(self) -> int | None:
        """None where the version's own file is full."""
        return self.files[-1].base_version

    @property
    def place(self) -> str:
        """Path or URL of the version's own file."""
        return self.files[-1].place

    @property
    def bytes(self) -> int:
        """Length of the version's own file."""
        return self.files[-1].bytes

    @property
    def broadcast_name(self) -> str:
        """Name of this version's broadcast; empty if it had none."""
        return self.broadcast.rpartition("/")[2]

    @property
    def state(self) -> str:
        """The state of all tensors, see `state_of`."""
        return self.files[-1].state

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The tensors by name."""
        return {entry.name: entry for entry in self.tensors}


def state_of(tensors: Iterable[TensorEntry]) -> str:
    """Identifies the content of all tensors, as 16 hex digits. Their order does not matter."""
    lines = sorted(f"{t.name} {t.dtype} {list(t.shape)} {t.xxh3}" for t in tensors)
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def _place_field(transport: str) -> str:
    return "url" if transport in SERVED else "path"


def _parse_entry(fields: Mapping[str, Any]) -> TensorEntry:
    for name in ("name", "shape", "dtype", "xxh3"):
        if name not in fields:
            raise WeightsRefused(f"manifest entry {fields.get('name', '?')!r} has no field {name!r}")
    return TensorEntry(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["xxh3"])


def _check_types(files: Sequence[ChainFile], tensors: Sequence[TensorEntry], adapter: AdapterSpec | None) -> None:
    """Raises `TypeError`: what passes here reaches files, URLs and the engine."""
    for file in files:
        _check_fields(file, int, "version", "bytes")
        _check_fields(file, int if file.base_version is not None else type(None), "base_version")
        _check_fields(file, str, "place", "xxh3", "state")
    for entry in tensors:
        _check_fields(entry, str, "name", "dtype", "xxh3")
        if not all(type(size) is int for size in entry.shape):
            raise TypeError(f"manifest entry {entry.name!r}: the shape is {entry.shape!r:.100}")
    if adapter is not None:
        _check_fields(adapter, dict, "config")
        _check_fields(adapter, str, "base")


def _check_fields(part: ChainFile | TensorEntry | AdapterSpec, kind: type, *names: str) -> None:
    for name in names:
        if type(value := getattr(part, name)) is not kind:
            raise TypeError(f"manifest: {type(part).__name__}.{name} is {value!r:.100}, not {kind.__name__}")


def _check_chain(files: tuple[ChainFile, ...]) -> None:
    """Raises `WeightsRefused` unless the first file is full and each other one is a delta on the file before."""
    expected = None
    for file in files:
        if file.base_version != expected:
            raise WeightsRefused(
                f"version {files[-1].version}: the chain's file {file.version} is on {file.base_version},"
                f" the file before it is {expected}"
            )
        expected = file.version
