"""Does an engine hold what was published? Its parameters against the verified tensors, value by value.

Engines fuse and drop parameters: rows of several published tensors are stacked in one, output heads are tied,
vocabularies are padded, weights are quantised or kept transposed, and layers whose kernel wants another layout keep a
packed copy only. What still has the published values in their order is compared; the rest is counted by its reason.

A comparison never holds a second copy: it goes piece by piece, on the parameter's own device. There a sample is
compared, because every value would have to cross the bus once more; those of `SAMPLE_EVERY` versions are all values.
Of a version that replaced the parameters as it came no copy is left: there the first rows of each tensor are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

PIECE_VALUES = 4 << 20
"""Values that are compared at once."""
SAMPLE_EVERY = 16
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which published values are rounded and compared; others hold scaled values."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result for an engine's parameters."""

    equal: int
    incomparable: int
    """Split over ranks, packed, quantised, transposed, or unknown to the version."""
    different: str = ""
    """The first one that holds other values, in the engine's own name."""
    reasons: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Why parameters were not compared, and how many each."""

    @property
    def reasons_text(self) -> str:
        """Return text for a log line: `` (quantised: 12, split or packed: 3)``; empty where all were compared."""
        counts = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.items())
        return f" ({counts})" if counts else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Which pieces of each parameter are compared: the first, and one in `every`, which moves on with `turn`."""

    every: int = 1
    turn: int = 0
    piece_values: int = PIECE_VALUES

    @classmethod
    def of(cls, version: int, device: torch.device) -> Sample:
        """All values in host memory, which cost nothing but their reading."""
        return cls() if device.type == "cpu" else cls(SAMPLE_EVERY, version, 1 << 18)

    def takes(self, piece: int) -> bool:
        return piece == 0 or (piece + self.turn) % self.every == 0


EVERYTHING = Sample()


class Excerpts:
    """The first rows of published tensors whose other values are not kept."""

    def __init__(self) -> None:
        self.forms: dict[str, torch.Tensor] = {}
        """Shape and dtype of the whole tensors, by name, on the device ``meta``."""
        self.rows: dict[str, torch.Tensor] = {}
        """[some rows, …] of each."""

    def noted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors`, an excerpt kept of each that goes by. Engines pack experts: those cannot be compared."""
        for name, tensor in tensors:
            if tensor.ndim and ".experts." not in name:
                row = max(1, tensor[:1].numel())
                self.forms[name] = torch.empty_like(tensor, device="meta")
                # Of each tensor 1,024 values are kept; one row at least.
                self.rows[name] = tensor[: max(1, (1 << 10) // row)].clone()
            yield name, tensor


def parts_of(name: str) -> tuple[str, ...]:
    """The published tensors that an engine's parameter is made of; itself if it is not fused."""
    # Engines' parameter of → the checkpoint's, in the order in which their rows are stacked.
    fused_parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for fused, parts in fused_parts.items():
        if f".{fused}." in name:
            return tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
    return (name,)


def compare_held(
    parameters: Iterable[tuple[str, torch.Tensor]], published: Mapping[str, torch.Tensor], sample: Sample = EVERYTHING
) -> Comparison:
    """Ends at the first difference. Reads only; published values are rounded to the parameter's dtype."""
    return _compared(parameters, published, lambda name, held: _holds(name, held, published, sample))


def compare_excerpts(
    parameters: Iterable[tuple[str, torch.Tensor]],
    forms: Mapping[str, torch.Tensor],
    rows: Mapping[str, torch.Tensor],
) -> Comparison:
    """Compares the first rows of each published tensor, otherwise as `compare_held`. See `Excerpts`."""
    return _compared(parameters, forms, lambda name, held: _begins(name, held, forms, rows))


def _compared(
    parameters: Iterable[tuple[str, torch.Tensor]],
    forms: Mapping[str, torch.Tensor],
    holds: Callable[[str, torch.Tensor], bool],
) -> Comparison:
    equal, reasons = 0, Counter[str]()
    for name, parameter in parameters:
        if reason := _incomparable(name, parameter, forms):
            reasons[reason] += 1
        elif holds(name, parameter.detach()):
            equal += 1
        else:
            return Comparison(equal, reasons.total(), name, dict(reasons))
    return Comparison(equal, reasons.total(), reasons=dict(reasons))


def _incomparable(name: str, parameter: torch.Tensor, published: Mapping[str, torch.Tensor]) -> str:
    """Why the parameter cannot hold the published values in their order; empty if it must."""
    names = parts_of(name)
    if not parameter.ndim or any(part not in published for part in names):
        return "unknown to the version"
    parts = [published[part] for part in names]
    if parameter.dtype not in _PLAIN and any(parameter.dtype != part.dtype for part in parts):
        return "quantised"
    rows = sum(len(part) for part in parts if part.ndim)
    # More rows are padding of the vocabulary; fewer are one rank's share.
    if any(part.shape[1:] != parameter.shape[1:] for part in parts) or not 0 < rows <= len(parameter):
        return "split or packed"
    return "" if parameter.is_contiguous() else "transposed"


def _holds(name: str, parameter: torch.Tensor, published: Mapping[str, torch.Tensor], sample: Sample) -> bool:
    first = 0
    for part in parts_of(name):
        expected = published[part]
        for rows, values in _pieces(parameter[first : first + len(expected)], expected, sample):
            if not torch.equal(rows, values.to(rows.device, rows.dtype)):
                return False
        first += len(expected)
    return True


def _begins(
    name: str, parameter: torch.Tensor, forms: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor]
) -> bool:
    first = 0
    for part in parts_of(name):
        expected = rows[part]
        if not torch.equal(parameter[first : first + len(expected)], expected.to(parameter.device, parameter.dtype)):
            return False
        first += len(forms[part])
    return True


def _pieces(rows: torch.Tensor, expected: torch.Tensor, sample: Sample) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in the same pieces of whole rows, about `Sample.piece_values` values each."""
    step = max(1, sample.piece_values // max(1, rows[0].numel()))
    for number, first in enumerate(range(0, len(rows), step)):
        if sample.takes(number):
            yield rows[first : first + step], expected[first : first + step]
