"""The manifest of one policy version: which tensors it has, where they are, and what their bytes must be.

Plain data, so that it travels through the queue and over HTTP:

    {"version": 3, "transport": "shm", "path": "/dev/shm/…/weights-00000003.safetensors", "bytes": 4012345,
     "xxh3": "27…", "base_version": null, "chain": [], "deltas_follow": false,
     "tensors": [{"name": "lm_head.weight", "shape": [512, 64], "dtype": "float32", "xxh3": "9f…"}, …]}

A delta names the version that it changes in ``base_version``, and in ``chain`` the files before its own
(`chain.links_of`); ``tensors`` is about the whole tensors all the same. Under ``http`` and ``collective`` there is
a ``url`` instead of the ``path``; with the latter, ``round`` is the URL at which the version's round is joined.

Of a LoRA adapter, ``tensors`` are its own, and ``"adapter": {"config": {"r": 8, …}, "base": "5c…"}`` has what they mean
and the state of the model folder that they are added to; servers load what that leads to (`merge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import xxhash

from penstock.weight_sync.chain import SERVED, Link, place_of
from penstock.weight_sync.errors import WeightsRefused

Transport = Literal["shm", "disk", "http", "collective"]
NamedTensors = Iterable[tuple[str, torch.Tensor]]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order, [nbytes]; a view where the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-64 of the raw bytes, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor.cpu()))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def describe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """One entry of a manifest's ``tensors``."""
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "xxh3": checksum(tensor),
    }


def build_manifest(
    transport: Transport,
    chain: Sequence[Link],
    tensors: Sequence[Mapping[str, Any]],
    *,
    deltas_follow: bool = False,
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`chain` ends with the version's own file; `tensors` come from `describe`.

    `deltas_follow` tells servers to keep a host copy: later versions may be changes of this one.
    """
    *before, own = chain
    manifest = {
        "version": own.version,
        "transport": transport,
        "url" if transport in SERVED else "path": own.place,
        "bytes": own.bytes,
        "xxh3": own.xxh3,
        "base_version": own.base_version,
        "chain": [link.as_dict() for link in before],
        "deltas_follow": deltas_follow,
        "tensors": [dict(entry) for entry in tensors],
    }
    return manifest if adapter is None else manifest | {"adapter": dict(adapter)}


def entries(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The manifest's tensors by name. Raises `WeightsRefused` where a field is missing."""
    place_of(manifest)
    for field in ("version", "transport", "bytes", "tensors"):
        if field not in manifest:
            raise WeightsRefused(f"manifest has no field {field!r}")
    for entry in manifest["tensors"]:
        for field in ("name", "shape", "dtype", "xxh3"):
            if field not in entry:
                raise WeightsRefused(f"manifest entry {entry.get('name', '?')!r} has no field {field!r}")
    return {entry["name"]: entry for entry in manifest["tensors"]}


def verify_names(manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises `WeightsRefused` naming the first tensor that only one side has."""
    wanted, present = set(entries(manifest)), set(names)
    if missing := sorted(wanted - present):
        raise WeightsRefused(f"version {manifest['version']}: tensor {missing[0]!r} is missing")
    if extra := sorted(present - wanted):
        raise WeightsRefused(f"version {manifest['version']}: tensor {extra[0]!r} is not in the manifest")


def verify_tensor(version: int, entry: Mapping[str, Any], tensor: torch.Tensor) -> None:
    """Raises `WeightsRefused` naming the tensor where shape, dtype or bytes differ from the manifest's entry."""
    name = f"version {version}: tensor {entry['name']!r}"
    if list(tensor.shape) != list(entry["shape"]):
        raise WeightsRefused(f"{name} has shape {list(tensor.shape)}, the manifest says {list(entry['shape'])}")
    if dtype_name(tensor.dtype) != entry["dtype"]:
        raise WeightsRefused(f"{name} is {dtype_name(tensor.dtype)}, the manifest says {entry['dtype']}")
    if (found := checksum(tensor)) != entry["xxh3"]:
        raise WeightsRefused(f"{name} has checksum {found}, the manifest says {entry['xxh3']}")


def verify_tensors(manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `WeightsRefused` unless names, shapes, dtypes and bytes are exactly the manifest's."""
    wanted = entries(manifest)
    verify_names(manifest, tensors)
    for name, entry in wanted.items():
        verify_tensor(manifest["version"], entry, tensors[name])
