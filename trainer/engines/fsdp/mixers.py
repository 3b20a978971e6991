"""Layers that carry a state from token to token: Gated DeltaNet, Mamba, short convolutions.

In a pack the state of one row would flow into the next: transformers' own loops in torch take a pack for one row,
without a word. Two ways to keep rows apart:

    by kernels     the GPU's kernels start anew at each of the rows' bounds (`fla`, `mamba_ssm`, `causal_conv1d`)
    row by row     the layer is called once for every row; all other layers still see the whole pack

Where rows share their beginnings the layer reads each row whole, row by row, and keeps what no row before it has. Under
context parallelism each rank reads the whole pack and keeps its own tokens. In both only these layers compute more.

A further family of such layers is one entry of `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.trainer.engines.fsdp.attention import VisibleKeys
from penstock.trainer.engines.fsdp.context import ContextGroup

GATED_DELTA = ("fla", "causal_conv1d")
MAMBA2 = ("mamba_ssm", "causal_conv1d")
CONVOLUTION = ("causal_conv1d",)
MIXERS: Mapping[str, tuple[str, ...]] = {
    "Qwen3NextGatedDeltaNet": GATED_DELTA,
    "Qwen3_5GatedDeltaNet": GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
    "OlmoHybridGatedDeltaNet": GATED_DELTA,
    "NemotronHMamba2Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "Lfm2ShortConv": CONVOLUTION,
    "Lfm2MoeShortConv": CONVOLUTION,
}
"""transformers' class → the packages whose kernels take the bounds of packed rows; one that is missing is replaced by a
loop in torch that takes none."""


def mixers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in MIXERS]


def kinds_of_mixers(model: nn.Module) -> str:
    return ", ".join(sorted({type(mixer).__name__ for mixer in mixers_of(model)}))


def has_kernels(model: nn.Module) -> bool:
    """Return True if packages and device are there with which all its mixers may keep rows apart."""
    packages = {package for mixer in mixers_of(model) for package in MIXERS[type(mixer).__name__]}
    return bool(packages) and torch.cuda.is_available() and all(find_spec(package) for package in packages)


def mix_rows(model: nn.Module, *, row_by_row: bool) -> None:
    """Wrap the `forward` of each mixer in place, so that parameters keep their names."""
    for mixer in mixers_of(model):
        mixer.forward = _MixedRows(mixer.forward, row_by_row)


@dataclass(frozen=True, slots=True)
class _MixedRows:
    """The forward of a mixer, to which whole rows are given: also where ranks share out a pack's tokens, and where a
    run continues another one's row, whose tokens are then read again."""

    plain: Callable[..., Tensor]
    row_by_row: bool

    @torch.compiler.disable  # lengths of rows are read on the host
    def __call__(self, hidden_states: Tensor, *args: Any, **arguments: Any) -> Tensor:
        """[1, l, H] → [1, l, H]. A collective over the ranks of `context`, and so is its backward."""
        context: ContextGroup | None = arguments.pop("context", None)
        seen: VisibleKeys | None = arguments.pop("seen", None)
        pack = hidden_states if context is None else context.gather(hidden_states)
        if self.row_by_row or (seen is not None and seen.places is not None):
            bounds, _ = arguments.pop("cu_seq_lens_q", None), arguments.pop("seq_idx", None)
            rows = seen or _rows_of(pack, bounds)
            mixed = _row_by_row(lambda row: self.plain(row, *args, **arguments), pack, rows)
        else:
            mixed = self.plain(pack, *args, **arguments)
        return mixed if context is None else context.own(mixed)


def _rows_of(pack: Tensor, bounds: Tensor | None) -> VisibleKeys:
    """The rows of a call without `seen`; one without bounds too."""
    whole = torch.tensor([0, pack.shape[1]], dtype=torch.int32) if bounds is None else bounds
    return VisibleKeys.of(whole, whole.diff())


def _row_by_row(call: Callable[[Tensor], Tensor], pack: Tensor, rows: VisibleKeys) -> Tensor:
    """The tokens that a run continues are read again, in the backward too: nothing is kept of them."""
    if rows.places is None:
        return torch.cat([call(row) for row in pack.split(list(rows.query_lengths), dim=1)], dim=1)

    def end_of_row(places: Tensor, tokens: int) -> Tensor:
        return call(pack[:, places])[:, -tokens:]

    mixed = []
    for places, tokens in zip(rows.places.split(list(rows.key_lengths)), rows.query_lengths, strict=True):
        if len(places) == tokens:
            mixed.append(end_of_row(places, tokens))
        else:
            mixed.append(checkpoint(end_of_row, places, tokens, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(mixed, dim=1)
