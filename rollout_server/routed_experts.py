"""The experts that a mixture's routers chose, as text in a `Chunk`: blocks of rows, joined by putting lists together.

A block is base64 of a ``.npy`` file with `RoutedExperts` [rows, layers, k], which is also how vLLM sends them. Blocks
follow each other; the last row of a chunk is of the forward pass that sampled its last token, so that they need no
position of their own:

    context  c0 c1 c2, sampled  s0 s1 │ s2          chunk 1: rows of c0 c1 c2 s0          chunk 2: the row of s1
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.transfer_queue import RoutedExperts


def experts_dtype(experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest type for numbers below `experts`."""
    return np.uint8 if experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Experts of one model."""

    layers: int
    """Number of layers with experts."""
    experts: int
    """Number of experts of one layer."""
    per_token: int
    """Chosen for each token."""

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return experts_dtype(self.experts)


def encode_rows(rows: NDArray[Any]) -> str:
    """One block."""
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode_rows(blocks: Sequence[str]) -> RoutedExperts | None:
    """The rows of all blocks; None without blocks. Raises `ValueError` for what is none."""
    if not blocks:
        return None
    return np.concatenate([_decoded(block) for block in blocks])


def _decoded(block: str) -> NDArray[Any]:
    try:
        rows: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(block, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise ValueError(f"routed_experts: no block of rows: {error}") from error
    if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"routed_experts: {rows.dtype} of shape {rows.shape}, not [rows, layers, k] of uint8 or uint16"
        )
    return rows


def rows_between(blocks: Sequence[str], end: int, start: int) -> RoutedExperts | None:
    """Rows of the positions from `start` on, of blocks whose rows end before position `end`. Those that the blocks
    lack are 0: not known. None if they have none of them."""
    rows = decode_rows(blocks)
    if rows is None or not len(rows) or start >= end:
        return None
    missing = (end - start) - len(rows)
    if missing <= 0:
        return rows[-missing:]
    return np.concatenate([np.zeros((missing, *rows.shape[1:]), dtype=rows.dtype), rows])


def without_last(blocks: Sequence[str], count: int) -> list[str]:
    """The blocks without their last `count` rows."""
    rows = decode_rows(blocks)
    if rows is None or count <= 0:
        return list(blocks)
    remaining = rows[: max(0, len(rows) - count)]
    return [encode_rows(remaining)] if len(remaining) else []


# what a model's settings say -----------------------------------------------------------------------------------------
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
LEAST_PER_TOKEN = 2
"""With one expert per token an unknown choice could not be distinguished from a known one."""


@dataclass(frozen=True, slots=True)
class MixtureLayers:
    """A model's layers, as engines number them."""

    mixtures: Mixtures
    all_layers: int
    with_experts: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts of one token."""
        return self.mixtures.layers * self.mixtures.per_token * np.dtype(self.mixtures.dtype).itemsize

    def block(self, rows: NDArray[Any], positions: int) -> str:
        """`rows` [positions, all layers, k] of an engine that reports dense layers too. Raises `ValueError`."""
        expected = (positions, self.all_layers, self.mixtures.per_token)
        if rows.shape != expected:
            raise ValueError(f"shape {rows.shape}, not {expected}")
        chosen = rows[:, self.with_experts, :]
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.mixtures.experts:
            raise ValueError(f"experts up to {chosen.max()}, of {self.mixtures.experts}")
        return encode_rows(chosen.astype(self.mixtures.dtype))


def mixture_layers(config: Mapping[str, Any]) -> MixtureLayers:
    """Reads a model's ``config.json``. Raises `ValueError` for a model without experts, or one that sees pictures."""
    if "vision_config" in config:
        raise ValueError("the model sees pictures, of whose tokens no engine records the experts")
    text = config.get("text_config") or config
    experts = next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
    per_token = next((int(text[name]) for name in PER_TOKEN if text.get(name)), 0)
    layers = int(text.get("num_hidden_layers") or 0)
    chosen = tuple(layer for layer in range(layers) if _has_experts(text, layer))
    if not experts or not chosen:
        raise ValueError("the model has no layers with experts")
    if per_token < LEAST_PER_TOKEN:
        raise ValueError(f"the model has {per_token or 'an unknown number of'} experts per token, not 2 or more")
    return MixtureLayers(Mixtures(len(chosen), experts, per_token), layers, chosen)


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    if kinds := text.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer in (text.get("mlp_only_layers") or ()) or layer < (text.get("first_k_dense_replace") or 0):
        return False
    every = text.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return bool(every[layer])
    return (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0 and layer % every == 0
