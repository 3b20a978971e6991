"""Whether the model is there and whole, its vocabulary fits its tokenizer, and its context is long enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, skipped, warning
from penstock.deploy.preflight.model_files import BadModel, read_weights

EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
SAVE = "save the model and its tokenizer with save_pretrained into this folder"


def check_model(config: RunConfig) -> Check:
    folder = Path(config.model)
    if not folder.is_dir():
        hub_name = config.model.count("/") == 1 and not config.model.startswith((".", "/"))
        mend = "give a folder with config.json, tokenizer and *.safetensors, or a hub name such as Qwen/Qwen3-0.6B"
        return Check(
            "model", hub_name, f"{config.model} (no such folder{'; taken as a hub name' if hub_name else ''})", mend
        )
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if missing:
        return Check("model", False, f"{folder} lacks {', '.join(missing)}", SAVE)
    return _check_weights(folder)


def _check_weights(folder: Path) -> Check:
    try:
        read_config(folder)
        weights = read_weights(folder)
    except BadModel as error:
        return Check("model", False, f"{folder}: {error}", error.mend)
    if weights is None and not any(folder.glob("*.bin")):
        return Check("model", False, f"{folder} has no weights: no *.safetensors", SAVE)
    told = f"{weights.parameters / 1e6:.1f} M parameters" if weights else "weights as .bin files"
    return Check("model", True, f"{folder}: {told}")


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, of a model with several parts that of its text. Raises `BadModel`."""
    try:
        told = json.loads((folder / "config.json").read_text())
        found: dict[str, Any] = told.get("text_config", told)
    except (OSError, ValueError, AttributeError) as error:
        raise BadModel(f"config.json cannot be read: {error}") from error
    return found


def check_vocabulary(config: RunConfig) -> Check | None:
    """An id beyond the embedding's rows would be looked up outside of the weights."""
    folder = Path(config.model)
    if not folder.is_dir() or not (folder / "tokenizer.json").is_file():
        return None
    try:
        weights = read_weights(folder)
        rows = next(
            (shape[0] for name, shape in (weights.shapes if weights else {}).items() if name.endswith(EMBEDDING)), 0
        )
        highest = _highest_id(folder / "tokenizer.json")
    except BadModel as error:
        return Check("vocabulary", False, str(error), error.mend)
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
        raise BadModel(f"tokenizer.json cannot be read: {error}") from error


def check_context(config: RunConfig) -> Check | None:
    """Positions beyond those that the model was trained on; stock engines refuse to start with them."""
    folder = Path(config.model)
    if not folder.is_dir():
        return None
    try:
        told = read_config(folder)
    except BadModel:
        return None  # `check_model` says so
    most, wanted = told.get("max_position_embeddings"), config.rollout.max_model_len
    if not isinstance(most, int) or wanted <= most or _is_stretched(told):
        return Check("context length", True, f"{wanted} of {most} positions")
    found = f"rollout.max_model_len is {wanted}, the model has {most} positions (max_position_embeddings)"
    mend = f"set rollout.max_model_len to {most} or less, or take a model with a longer context"
    if config.rollout.engine == "hf":
        return warning("context length", found, mend)
    return Check("context length", False, found, mend)


def _is_stretched(told: dict[str, Any]) -> bool:
    """YaRN and its like: the engine works the length out."""
    settings = told.get("rope_scaling") or told.get("rope_parameters") or {}
    kind = settings.get("rope_type", settings.get("type", "default")) if isinstance(settings, dict) else "default"
    return kind != "default"
