"""Layers that carry a state from token to token: Gated DeltaNet, Mamba, short convolutions.

In a pack the state of one row would flow into the next: transformers' own loops in torch take a pack for one row,
without a word. Two ways to keep rows apart:

    by kernels     the GPU's kernels start anew at each of the rows' bounds (`fla`, `mamba_ssm`, `causal_conv1d`)
    row by row     the layer is called once for every row; all other layers still see the whole pack

A further family of such layers is one entry of `MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.engines.fsdp.attention import VisibleKeys

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


def mix_row_by_row(model: nn.Module) -> None:
    """Each mixer's `forward` alone is wrapped, in place: no parameter gets another name."""
    for mixer in mixers_of(model):
        mixer.forward = _row_by_row(mixer.forward)


def _row_by_row(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.compiler.disable  # lengths of rows are read on the host
    def wrapped(hidden_states: Tensor, *args: Any, **arguments: Any) -> Tensor:
        bounds, numbers = arguments.pop("cu_seq_lens_q", None), arguments.pop("seq_idx", None)
        seen: VisibleKeys | None = arguments.pop("seen", None)
        if seen is not None:
            lengths = list(seen.query_lengths)
        elif bounds is not None:
            lengths = bounds.diff().tolist()
        elif numbers is not None:  # all that some layers are given
            lengths = numbers[0].unique_consecutive(return_counts=True)[1].tolist()
        else:
            lengths = [hidden_states.shape[1]]
        rows = hidden_states.split(lengths, dim=1)
        return torch.cat([forward(row, *args, **arguments) for row in rows], dim=1)

    return wrapped
