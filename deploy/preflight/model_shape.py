"""The sizes of a model: of its weights' headers, or of a config.json that the hub's cache has or that ships."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.model import BadModelFiles, WeightFiles, read_config, read_weights
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.shipped import shipped_sizes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one model; widths in elements."""

    parameters: int
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    lora: int
    """Parameters of LoRA's matrices per rank of theirs: Σ (rows + columns) of the layers' matrices but the experts'."""
    experts_lora: int = 0
    """Same as `lora`, of all experts. Matrices that lie joined in memory (gate, up) have one A."""
    outer: int = 0
    """Parameters outside of the layers: embedding and head."""
    head: int = 0
    """Parameters of the output layer, which may be the embedding itself."""
    experts: int = 0
    """Parameters of all experts of a mixture."""
    routed: int = 0
    """Experts of a token in a mixture; 0 in a dense model."""
    expert_count: int = 0
    """Experts of a layer."""
    expert_layers: int = 0
    """Layers with experts; others of a mixture may be dense."""
    heads: int = 0
    """Query heads."""
    dtype: str = "float32"
    """Dtype of the weights in the model's config."""


def shape_of(declared: Mapping[str, Any], weights: WeightFiles) -> ModelShape | None:
    """Return the sizes of ``config.json`` and the headers of the weights; None if the config names them otherwise."""
    try:
        hidden, heads = int(declared["hidden_size"]), int(declared["num_attention_heads"])
        head = int(declared.get("head_dim") or hidden // heads)
        routed = int(declared.get("num_experts_per_tok") or 0)
        mlp = int(declared.get("moe_intermediate_size") or declared["intermediate_size"]) * (routed or 1)
        layers, key_value = int(declared["num_hidden_layers"]), int(declared.get("num_key_value_heads") or heads) * head
    except (KeyError, TypeError, ValueError):
        return None
    matrices = (
        shape
        for name, shape in weights.shapes.items()
        if len(shape) == 2 and _in_layer(name) and ".experts." not in name
    )
    outer = {name: math.prod(shape) for name, shape in weights.shapes.items() if not _in_layer(name)}
    return ModelShape(
        *(weights.parameters, layers, hidden, heads * head, key_value, mlp, sum(map(sum, matrices))),
        experts_lora=sum(_of_experts(name, shape) for name, shape in weights.shapes.items() if ".experts." in name),
        outer=sum(outer.values()),
        head=next((size for name, size in outer.items() if "lm_head" in name), sum(outer.values())),
        experts=sum(math.prod(shape) for name, shape in weights.shapes.items() if ".experts." in name),
        routed=routed,
        expert_count=_expert_count(declared),
        expert_layers=len({name.partition(".experts.")[0] for name in weights.shapes if ".experts." in name}),
        heads=heads,
        dtype=str(declared.get("dtype") or declared.get("torch_dtype") or "float32"),
    )


def _of_experts(name: str, shape: tuple[int, ...]) -> int:
    """Σ of the rows and columns of one expert's matrix, or of a stack of them; 0 of a bias."""
    if len(shape) == 3:
        return shape[0] * (shape[1] + shape[2])
    if len(shape) != 2 or "bias" in name:
        return 0
    return shape[0] + (0 if any(part in name for part in (".gate_proj", ".w1")) else shape[1])


def _in_layer(name: str) -> bool:
    return ".layers." in f".{name}"


def shape_from_config(declared: Mapping[str, Any]) -> ModelShape | None:
    """Without weights: their matrices as a config.json describes them; biases and norms are less than a thousandth.

    None for a model whose config names its sizes otherwise.
    """
    if "kv_lora_rank" in declared:  # keys and values from a narrow projection: other matrices, another cache
        return None
    try:
        return shape_of(declared, WeightFiles(dict(_matrices(declared)), 0))
    except (KeyError, TypeError, ValueError):
        return None


def _matrices(declared: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, heads = int(declared["hidden_size"]), int(declared["num_attention_heads"])
    head = int(declared.get("head_dim") or hidden // heads)
    key_value = int(declared.get("num_key_value_heads") or heads) * head
    vocabulary = (int(declared["vocab_size"]), hidden)
    outer = ("embed_tokens",) if declared.get("tie_word_embeddings") else ("embed_tokens", "lm_head")
    yield from ((name, vocabulary) for name in outer)
    for layer in range(int(declared["num_hidden_layers"])):
        at = f"layers.{layer}"
        yield from ((f"{at}.{name}_proj", (heads * head, hidden)) for name in "qo")
        yield from ((f"{at}.{name}_proj", (key_value, hidden)) for name in "kv")
        yield from ((f"{at}.{name}", (width, hidden)) for name, width in _mlps(declared, layer))


def _mlps(declared: Mapping[str, Any], layer: int) -> Iterator[tuple[str, int]]:
    """(name, width) of the three matrices of each gated MLP of a layer, and of its router."""
    experts = _expert_count(declared)
    if not experts or layer < int(declared.get("first_k_dense_replace") or 0):
        yield from ((f"mlp.{part}_proj", int(declared["intermediate_size"])) for part in ("gate", "up", "down"))
        return
    width = int(declared.get("moe_intermediate_size") or declared["intermediate_size"])
    shared = int(declared.get("shared_expert_intermediate_size") or 0)
    shared += int(declared.get("n_shared_experts") or 0) * width
    yield "router", experts
    for part in ("gate", "up", "down"):
        yield from ((f"mlp.experts.{expert}.{part}_proj", width) for expert in range(experts))
        if shared:
            yield f"mlp.shared_expert.{part}_proj", shared


def _expert_count(declared: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(declared[name]) for name in names if declared.get(name)), 0)


def model_shape(config: RunConfig) -> ModelShape | None:
    """Return the sizes of the model; None if they are unknown. `check_model` reports faults of the folder."""
    folder = Path(config.model)
    if not folder.is_dir():
        return None
    try:
        weights = read_weights(folder)
        return shape_of(read_config(folder), weights) if weights else None
    except BadModelFiles:
        return None


def find_shape(config: RunConfig) -> tuple[ModelShape | None, str]:
    """(sizes, where from). Raises `ConfigError` for a config.json that cannot be read."""
    if (shape := model_shape(config)) is not None:
        return shape, "weights"
    if (Path(config.model) / "config.json").is_file():
        return described_shape(Path(config.model)), "config.json"
    if (cached := _cached_config(config.model)) is not None:
        return described_shape(cached), "hub cache"
    shipped = shipped_sizes(config.model)
    return (shape_from_config(shipped), "shipped") if shipped else (None, "")


def described_shape(path: Path) -> ModelShape | None:
    file = path / "config.json" if path.is_dir() else path
    try:
        return shape_from_config(read_config(file))
    except BadModelFiles as error:
        raise ConfigError(f"{file}: {error}; name a model's config.json, or the folder that has it") from None


def _cached_config(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path
        return None
    return Path(path) if isinstance(path, str) else None
