"""Facts from a model folder: its vocabulary, and the tensors of a whole version of its weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.rollout_server.import_without_torch import no_torch
from penstock.rollout_server.protocol import EngineError
from penstock.rollout_server.routed_experts import MixtureLayers, mixture_layers
from penstock.weight_sync import Manifest, WeightsRefused

Shapes = dict[str, tuple[int, ...]]
_OUTPUT_HEAD = "lm_head.weight"


def context_length(settings: Mapping[str, Any]) -> int:
    """Return the longest row in tokens that a model takes, by its text's ``config.json``. 2²⁰ if it names none, as
    for models that encode distances (Bloom) or carry a state: they are limited by memory alone."""
    lengths = (settings.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((length for length in lengths if isinstance(length, int) and length > 0), 1 << 20)


def find_model(model: str) -> Path:
    """The folder of `model` on this machine. Raises `EngineError` if there is none."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise EngineError(f"model {model} is neither a folder nor in the hub's cache", retryable=False) from error


def fetch_model(model: str) -> Path:
    """The folder of `model`; one of the hub is fetched, or its missing files are. A path is left to the engine, which
    says what is wrong with it. The hub's client ends a connection that brings nothing for 10 s
    (HF_HUB_DOWNLOAD_TIMEOUT). Raises `EngineError`."""
    if Path(model).is_dir() or Path(model).is_absolute() or model.startswith("."):
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, ignore_patterns=UNREAD))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(model, allow_patterns="*.bin"))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise EngineError(
            f"model {model} is neither a folder nor in the hub's cache: {error}", retryable=False
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise EngineError(f"model {model} cannot be fetched from the hub: {error}") from error
    return folder


UNREAD = [
    "*.bin",
    "*.pth",
    "*.pt",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.h5",
    "*.msgpack",
    "original/*",
    "consolidated*",
]
"""Further files of a repository with safetensors: the same weights, or nothing that an engine reads."""


def start_deadline_s(timeout_s: float, folder: Path) -> float:
    """Deadline of a server's start: `timeout_s`, and the time that reading the weights in `folder` takes.

    Any disk, network disks included, brings 100 MB a second; engines that read faster are up earlier.
    """
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return timeout_s + sum(file.stat().st_size for file in files) / 100e6


def vocab_size(model: str) -> int:
    """Rows of the embedding. `model` is a folder or a name in the hub's cache. Raises `EngineError`."""
    with no_torch():
        from transformers import AutoConfig

        try:
            return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
        except (OSError, ValueError, AttributeError) as error:
            raise EngineError(
                f"model {model}: no readable config.json with a vocab_size: {error}", retryable=False
            ) from error


def has_vision_tower(model: str) -> bool:
    """Returns True if the model, a folder or a name in the hub's cache, sees images; False without a config.json."""
    try:
        return "vision_config" in json.loads((find_model(model) / "config.json").read_text())
    except (OSError, ValueError, EngineError):
        return False  # loading the model reports what is wrong with it


def layers_with_experts(model: str) -> MixtureLayers:
    """Layers of a folder or a name in the hub's cache. Raises `EngineError` if no engine records its experts."""
    file = find_model(model) / "config.json"
    try:
        return mixture_layers(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise EngineError(f"rollout.routing_replay: {model}: {error}", retryable=False) from error


def tensor_shapes(model: str) -> Shapes:
    """Shape of every tensor in the folder's safetensors files, by name; empty if there are none to look at."""
    shapes: Shapes = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def check_complete(manifest: Manifest, shapes: Shapes) -> None:
    """Refuse a version that is not exactly this model's tensors. Raises `WeightsRefused` naming the first that differs.

    An engine that is given a part of a fused layer fills the rest with whatever was in memory, and says nothing.
    The output head may be missing or extra: it is the embedding where the two are tied. Where nothing is known of the
    model (`shapes` is empty) nothing is refused.
    """
    entries = manifest.entries
    head = entries.get(_OUTPUT_HEAD)
    embedding = next((entry for name, entry in entries.items() if name.endswith("embed_tokens.weight")), head)
    # A head that the folder does not have is its embedding: engines load either one, and drop the other.
    if shapes and _OUTPUT_HEAD not in shapes and head and embedding and head.xxh3 != embedding.xxh3:
        raise WeightsRefused(
            f"version {manifest.version}: tensors {embedding.name!r} and {_OUTPUT_HEAD!r} are tied but differ"
        )
    check_names(manifest.version, {entry.name: entry.shape for entry in manifest.tensors}, shapes)


def check_names(version: int, offered: Mapping[str, tuple[int, ...]], shapes: Shapes) -> None:
    """`check_complete` before there are checksums: names and shapes alone."""
    if not shapes:
        return
    for name in sorted((shapes.keys() ^ offered.keys()) - {_OUTPUT_HEAD}):
        problem = "is missing" if name in shapes else "does not belong to the model"
        raise WeightsRefused(f"version {version}: tensor {name!r} {problem}")
    for name in sorted(shapes.keys() & offered.keys()):
        if shapes[name] != offered[name]:
            raise WeightsRefused(
                f"version {version}: tensor {name!r} has shape {list(offered[name])},"
                f" the model's has {list(shapes[name])}"
            )
