"""What a model folder says of itself: its vocabulary, and which tensors a whole version of its weights has."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from penstock.rollout_server.import_without_torch import no_torch
from penstock.rollout_server.protocol import EngineError
from penstock.rollout_server.routed_experts import MixtureLayers, mixture_layers
from penstock.weight_sync import Manifest, WeightsRefused

Shapes = dict[str, tuple[int, ...]]
_OUTPUT_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def find_model(model: str) -> Path:
    """The folder of `model` on this machine. Raises `EngineError` where there is none."""
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
"""Files of a repository beside its weights as safetensors: the same weights, or nothing that an engine reads."""
LOAD_BYTES_PER_S = 100e6
"""At which any disk, network disks included, brings weights; engines that read faster are up earlier."""


def start_deadline_s(timeout_s: float, folder: Path) -> float:
    """Of a server whose weights are in `folder`: `timeout_s`, and the time that they take to be read."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return timeout_s + sum(file.stat().st_size for file in files) / LOAD_BYTES_PER_S


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
    """Of a folder or a name in the hub's cache; False where its config.json cannot be read."""
    try:
        return "vision_config" in json.loads((find_model(model) / "config.json").read_text())
    except (OSError, ValueError, EngineError):
        return False  # whoever loads the model says what is wrong with it


def layers_with_experts(model: str) -> MixtureLayers:
    """Of a folder or a name in the hub's cache. Raises `EngineError` where no engine records its routed experts."""
    file = find_model(model) / "config.json"
    try:
        return mixture_layers(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise EngineError(f"rollout.routing_replay: {model}: {error}", retryable=False) from error


def tensor_shapes(model: str) -> Shapes:
    """Shape of every tensor in the folder's safetensors files, by name; empty where there are none to look at."""
    shapes: Shapes = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        shapes.update(_shapes_of(path))
    return shapes


def check_complete(manifest: Manifest, shapes: Shapes) -> None:
    """Refuse a version that is not exactly this model's tensors. Raises `WeightsRefused` naming the first that differs.

    An engine that is given a part of a fused layer fills the rest with whatever was in memory, and says nothing.
    The output head may be missing or extra: it is the embedding where the two are tied. Where nothing is known of the
    model (`shapes` is empty) nothing is refused.
    """
    if shapes:
        _check_tied_head(manifest, shapes)
    check_names(manifest.version, {entry.name: entry.shape for entry in manifest.tensors}, shapes)


def check_names(version: int, given: Mapping[str, tuple[int, ...]], shapes: Shapes) -> None:
    """`check_complete` before there are checksums: names and shapes alone."""
    if not shapes:
        return
    for name in sorted((shapes.keys() ^ given.keys()) - {_OUTPUT_HEAD}):
        problem = "is missing" if name in shapes else "does not belong to the model"
        raise WeightsRefused(f"version {version}: tensor {name!r} {problem}")
    for name in sorted(shapes.keys() & given.keys()):
        if shapes[name] != given[name]:
            raise WeightsRefused(
                f"version {version}: tensor {name!r} has shape {list(given[name])},"
                f" the model's has {list(shapes[name])}"
            )


def _check_tied_head(manifest: Manifest, shapes: Shapes) -> None:
    """A head that the model folder does not have is its embedding: engines load either one, and drop the other."""
    given = manifest.entries
    embedding = next((name for name in given if name.endswith(_EMBEDDING)), None)
    if _OUTPUT_HEAD in shapes or _OUTPUT_HEAD not in given or embedding is None:
        return
    if given[_OUTPUT_HEAD].xxh3 != given[embedding].xxh3:
        raise WeightsRefused(
            f"version {manifest.version}: tensors {embedding!r} and {_OUTPUT_HEAD!r} are tied but differ"
        )


def _shapes_of(path: Path) -> Shapes:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
