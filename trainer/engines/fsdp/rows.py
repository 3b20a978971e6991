"""The way of a pack's rows through a model, as `row_choice` chooses it.

    packed   rows end to end on one line; attention and mixers keep them apart        no padding, every speed setting
    padded   one line for each row, filled up on the right to the longest             any model that looks back only
    alone    one forward for each row                                                 what stays exact by definition

What fills up comes after its row's tokens, and a causal model looks back only: no token of a row sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.rollout_server import KEYWORD, Routing
from penstock.trainer.engines.fsdp import attention
from penstock.trainer.engines.fsdp.attention import VisibleKeys
from penstock.trainer.engines.fsdp.context import ContextGroup, PackPart
from penstock.trainer.engines.fsdp.mixers import mix_rows
from penstock.trainer.engines.fsdp.vision import Vision
from penstock.trainer.packing import RowLayout, on_device


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The layout of rows for one model."""

    layout: RowLayout
    attention: str
    """transformers' name of it."""
    mixers: str = ""
    """The kinds of its layers that carry a state from token to token; empty if it has none."""
    row_by_row: bool = False
    """They are called once for every row of a pack."""
    unpacked_because: str = ""
    """A sentence; empty where rows are packed."""

    def apply(self, model: PreTrainedModel) -> None:
        """Apply the plan in place, once for a model that `choose_rows` has not seen."""
        model.set_attn_implementation(self.attention)
        mix_rows(model, row_by_row=self.row_by_row)

    def __str__(self) -> str:
        if self.layout is RowLayout.PACKED:
            return f"rows packed, {self.mixers} row by row" if self.row_by_row else "rows packed"
        how = "padded to the longest of their batch" if self.layout is RowLayout.PADDED else "one by one"
        return f"rows {how} ({self.unpacked_because})"


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One call of a model. B = lines, W = their length, L = tokens of the pack that go through it."""

    arguments: dict[str, Any]
    """Keyword arguments of transformers' model"""
    line: Tensor | None = None
    """[L] first index of each token in what the model returns [B, W, …]; None: they are one line, as they lie"""
    column: Tensor | None = None
    """[L] second index"""
    blank: tuple[int, int] | None = None
    """First and second index of a token of a blank image, see `vision`."""

    def of_pack(self, output: Tensor) -> Tensor:
        """[B, W, …] → [L, …]"""
        picked = output[0] if self.line is None else output[self.line, self.column]
        return picked if self.blank is None else picked + output[self.blank].sum() * 0


def run_rows(
    call: Callable[[dict[str, Any]], Tensor],
    part: PackPart,
    plan: RowPlan,
    context: ContextGroup | None = None,
    *,
    routed: bool = False,
    vision: Vision | None = None,
) -> Tensor:
    """[L, …] of a pack's tokens, in its order; `call`: keyword arguments → [B, W, …]. `routed`: it has `Routers`;
    `vision`: it sees images."""
    calls = row_inputs(part, plan, context, routed=routed, vision=vision)
    outputs = [inputs.of_pack(call(inputs.arguments)) for inputs in calls]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def row_inputs(
    part: PackPart,
    plan: RowPlan,
    context: ContextGroup | None = None,
    *,
    routed: bool = False,
    vision: Vision | None = None,
) -> Iterator[RowInputs]:
    """The calls by which the rows of one part of a pack go through the model."""
    experts = part.experts if routed else None
    if plan.layout is RowLayout.PACKED and vision is not None:
        yield _packed_seeing(part, plan, vision)
    elif plan.layout is RowLayout.PACKED:
        arguments = row_bounds_arguments(part.row_bounds, part.run_lengths, numbered=bool(plan.mixers))
        if plan.attention == attention.NAME:
            arguments["seen"] = VisibleKeys.of(part.row_bounds, part.run_lengths, part.forks)
        if context is not None:
            arguments["context"] = context
        if routed:
            arguments[KEYWORD] = Routing(experts)
        yield RowInputs(
            {"input_ids": part.ids[None], "position_ids": part.positions[None], "use_cache": False, **arguments}
        )
    elif plan.layout is RowLayout.PADDED:
        yield _padded(part, routed=routed, vision=vision)
    else:
        lengths = part.run_lengths.tolist()
        experts_by_row = [None] * len(lengths) if experts is None else experts.split(lengths)
        for row, of_row in zip(part.ids.split(lengths), experts_by_row, strict=True):
            routing = {KEYWORD: Routing(of_row)} if routed else {}
            yield RowInputs({"input_ids": row[None], "use_cache": False, **routing})


def _padded(part: PackPart, *, routed: bool, vision: Vision | None = None) -> RowInputs:
    lengths, device = part.run_lengths.long(), part.ids.device
    line = on_device(torch.repeat_interleave(torch.arange(len(lengths)), lengths), device)
    ids = part.ids.new_zeros(len(lengths), int(lengths.max()))
    ids[line, part.positions] = part.ids
    extra: dict[str, Any] = {KEYWORD: _padded_routing(part, line, ids.shape[1])} if routed else {}
    lines = len(ids)
    if vision is not None:
        ids, seen = vision.look(ids, part.images)
        extra |= seen
    arguments = {"input_ids": ids, "use_cache": False, **extra}
    return RowInputs(arguments, line, part.positions, blank=(lines, 0) if len(ids) > lines else None)


def _packed_seeing(part: PackPart, plan: RowPlan, vision: Vision) -> RowInputs:
    length = len(part.ids)
    seen = vision.look_along(part.ids.split(part.run_lengths.tolist()), part.images)
    bounds = row_bounds_arguments(seen.bounds, seen.lengths)
    if plan.attention == attention.NAME:
        bounds["seen"] = VisibleKeys.of(seen.bounds, seen.lengths)
    arguments = {"input_ids": seen.ids, "position_ids": seen.positions, "use_cache": False, **bounds, **seen.arguments}
    if seen.ids.shape[1] == length:
        return RowInputs(arguments)
    column = torch.arange(length, device=part.ids.device)
    return RowInputs(arguments, torch.zeros_like(column), column, blank=(0, length))


def _padded_routing(part: PackPart, line: Tensor, width: int) -> Routing:
    """Return the routing of all tokens of all lines: padding is routed freely and counts for nothing."""
    tokens = (int(line[-1]) + 1) * width
    place = line * width + part.positions
    real = torch.zeros(tokens, dtype=torch.bool, device=line.device)
    real[place] = True
    if part.experts is None:
        return Routing(None, real)
    experts = part.experts.new_zeros(tokens, *part.experts.shape[1:])
    experts[place] = part.experts
    return Routing(experts, real)


def row_bounds_arguments(row_bounds: Tensor, run_lengths: Tensor, *, numbered: bool = False) -> dict[str, Any]:
    """The keyword arguments by which transformers hands packed rows' bounds to attention; `numbered`: also the row of
    each token, which mixers ask for."""
    longest = int(run_lengths.max())
    arguments: dict[str, Any] = {
        "cu_seq_lens_q": row_bounds,
        "cu_seq_lens_k": row_bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if numbered:
        numbers = torch.arange(len(run_lengths), dtype=torch.int32)
        lines = torch.repeat_interleave(numbers, run_lengths.long())[None]
        arguments["seq_idx"] = on_device(lines, row_bounds.device)
    return arguments
