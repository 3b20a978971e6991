"""Low-rank matrices at the linear layers of the hf engine, for some rows of a pass and not for others.

    y = W·x + s·B·(A·x)      A [r, in], B [out, r]; x of the tokens whose request has this adapter

All belongs to the decoding thread or is done between two passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.rollout_server.engines.hf.attention import ForwardStep
from penstock.weight_sync import BadAdapter, read_adapter


class _Sides(NamedTuple):
    a: torch.Tensor
    """[in, r]"""
    b: torch.Tensor
    """[r, out], times s"""


class LayerAdapters:
    """The adapters of one model by name."""

    def __init__(self, model: nn.Module) -> None:
        self._dtype = next(model.parameters()).dtype
        self._linear = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
        self._sides: dict[str, dict[nn.Module, _Sides]] = {}
        self._tokens: dict[str, torch.Tensor] = {}
        """Positions in the pass under way by adapter."""
        self._all = 0
        """Tokens of the pass under way."""
        for layer in self._linear.values():
            layer.register_forward_hook(self._add)

    @property
    def weights(self) -> Iterable[str]:
        """Names of the weights that an adapter may change."""
        return self._linear.keys()

    def read(self, folder: Path, names: Mapping[str | None, str]) -> dict[nn.Module, _Sides]:
        """The matrices of peft's folder by layer. `names`: a parameter's name by its name in the model's files.

        Raises `BadAdapter` for what changes no linear layer of this model, `OSError`, `SafetensorError`.
        """
        sides: dict[nn.Module, _Sides] = {}
        for stored, change in read_adapter(folder).items():
            layer = self._linear.get(names.get(stored, stored))
            if layer is None or (layer.out_features, layer.in_features) != change.shape:
                raise BadAdapter(f"{stored} {list(change.shape)} is not the weight of a linear layer of this model")
            b = change.b.float() * change.scale
            sides[layer] = _Sides(change.a.T.to(self._dtype).contiguous(), b.T.to(self._dtype).contiguous())
        return sides

    def put(self, name: str, sides: dict[nn.Module, _Sides]) -> None:
        self._sides[name] = sides

    def remove(self, name: str) -> None:
        del self._sides[name]

    @contextmanager
    def on(self, step: ForwardStep) -> Iterator[None]:
        """Within it a pass is that of `step`: each row with its own adapter."""
        tokens: dict[str, list[int]] = {}
        start = 0
        for row in step.rows:
            if row.adapter is not None:
                tokens.setdefault(row.adapter, []).extend(range(start, start + row.new))
            start += row.new
        self._tokens, self._all = {name: torch.tensor(places) for name, places in tokens.items()}, start
        try:
            yield
        finally:
            self._tokens = {}

    def _add(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """The hook of every linear layer. Its `output` is of all tokens of the pass, in order."""
        for name, tokens in self._tokens.items():
            if (sides := self._sides[name].get(layer)) is not None:
                rows = inputs[0].flatten(0, -2)
                if len(rows) != self._all:
                    raise RuntimeError(f"a layer with an adapter reads {len(rows)} of {self._all} tokens")
                output.flatten(0, -2).index_add_(0, tokens, rows[tokens] @ sides.a @ sides.b)
