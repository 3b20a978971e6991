"""The way of a pack's rows through a model: chosen once, when the model is loaded, by trying.

    packed   rows end to end on one line; attention and mixers keep them apart        no padding, every speed setting
    padded   one line for each row, filled up on the right to the longest             any model that looks back only
    alone    one forward for each row                                                 what stays exact by definition

The first that gives what the rows give alone, by transformers' `eager` attention, is taken. What fills up comes after
its row's tokens, and a causal model looks back only: no token of a row sees it. A model is refused only where its own
forward of one row cannot be trained on.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.rollout_server import KEYWORD, Routing
from penstock.trainer.engines.fsdp import attention
from penstock.trainer.engines.fsdp.attention import NoBounds, VisibleKeys
from penstock.trainer.engines.fsdp.context import ContextGroup, PackPart
from penstock.trainer.engines.fsdp.mixers import has_kernels, kinds_of_mixers, mix_row_by_row
from penstock.trainer.engines.fsdp.vision import Vision
from penstock.trainer.job import BadJob
from penstock.trainer.packing import RowLayout

logger = logging.getLogger(__name__)

UNPACKABLE = {
    "attention_chunk_size": "its chunks would begin with the pack, not with the row",
    "index_topk": "the keys that its indexer chooses would be those of the pack, not of the row",
}
"""Settings of a model → why its packed rows differ from rows alone once they are longer than those that are tried."""
LONGROPE = "its positions are encoded for the longest row of a call: longrope"
"""Why rows on both sides of `original_max_position_embeddings` differ from rows alone, packed and padded. Those that
are tried are all on one side."""
SHORT = (5, 3)
LONG = (70, 90)
"""Lengths of the rows that are tried; long ones where layers carry a state, whose loops take 64 tokens at a time."""
FIRST_ROW = (1, 2, 3, 4, 5)
TRIED_IMAGES = (((60, 90), (90, 60)), ((120, 60),), ())
"""Width and height of the images of each row that a model of images and text is tried on."""


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
        if self.row_by_row:
            mix_row_by_row(model)

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
            arguments["seen"] = VisibleKeys.of(part.row_bounds, part.run_lengths, part.parents)
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
    line = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
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
        arguments["seq_idx"] = torch.repeat_interleave(numbers, run_lengths.long())[None].to(row_bounds.device)
    return arguments


def choose_rows(model: PreTrainedModel, vision: Vision | None = None) -> RowPlan:
    """`model` has weights and takes the plan. Raises `BadJob` where its own forward fails or gives no numbers.

    One that sees images (`vision`) is tried on rows with some.
    """
    if vision is not None:
        probe = TrialRows.with_images(model, vision)
    else:
        probe = TrialRows.of(model, LONG if kinds_of_mixers(model) else SHORT)
    try:
        model.set_attn_implementation("eager")  # sdpa leaves out caps on scores
        reference = probe.alone()
    except Exception as error:  # a model's own code may raise anything
        raise BadJob(f"{_refusal(model)}: {first_sentence(error)}") from error
    if not torch.isfinite(reference).all():
        raise BadJob(f"{type(model).__name__} cannot be trained: {_not_finite(model)}")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}  # of the model, or by kind of layer
    if "longrope" in {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}:
        return _unpacked_plan(model, probe, reference, LONGROPE, (RowLayout.ALONE,))
    because = next((f"{why}: {name}" for name, why in UNPACKABLE.items() if getattr(config, name, None)), "")
    if not because:
        packed, because = _packed_plan(model, probe, reference)
        if packed is not None:
            return packed
    return _unpacked_plan(model, probe, reference, because, (RowLayout.PADDED, RowLayout.ALONE))


def _refusal(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} cannot be trained by trainer.engine fsdp"


def _packed_plan(model: PreTrainedModel, probe: TrialRows, reference: Tensor) -> tuple[RowPlan | None, str]:
    """(the plan, why there is none)"""
    because, mixers = "", kinds_of_mixers(model)
    for row_by_row in ([False] if has_kernels(model) or not mixers else []) + [True] * bool(mixers):
        if row_by_row:
            mix_row_by_row(model)
        for name in (attention.NAME, "sdpa"):
            plan = RowPlan(RowLayout.PACKED, name, mixers=mixers, row_by_row=row_by_row)
            try:
                # A vision tower's own attention goes both ways, and keeps its images apart by itself.
                seeing = name == attention.NAME and hasattr(model.config, "vision_config")
                parts = {"text_config": name, "vision_config": "sdpa"}
                model.set_attn_implementation(parts if seeing else name)
                packed = probe.by(plan)
            except NoBounds as error:  # transformers' own mask is a substitute: exact, and slower
                because = first_sentence(error)
                continue
            except Exception as error:  # noqa: BLE001 - as above; the next way may do
                because = first_sentence(error)
                break
            if _same(packed, reference):
                return plan, ""
            because = "its packed rows differ from the same rows alone"
            break
    return None, because


def _unpacked_plan(
    model: PreTrainedModel, probe: TrialRows, reference: Tensor, because: str, layouts: Sequence[RowLayout]
) -> RowPlan:
    """Return a plan with sdpa if that is exact, since eager keeps all scores of a row."""
    if probe.vision is not None:
        layouts = [one for one in layouts if one is not RowLayout.ALONE]
        if not layouts:
            raise BadJob(f"{_refusal(model)}: {because}, and rows with images are not computed one by one")
    for layout in layouts:
        for name in ("sdpa", "eager"):
            plan = RowPlan(layout, name, mixers=kinds_of_mixers(model), unpacked_because=because)
            try:
                model.set_attn_implementation(name)
                logits = probe.by(plan)
            except Exception as error:  # noqa: BLE001 - a model need not have sdpa, nor take several rows
                logger.debug("%s, %s: %s", layout, name, error)
                continue
            if _same(logits, reference):
                return plan
    raise BadJob(f"{_refusal(model)}: {because}, and one row gives other logits from call to call")


def _same(logits: Tensor, reference: Tensor) -> bool:
    return torch.allclose(logits, reference, atol=1e-4, rtol=1e-3)


def _not_finite(model: PreTrainedModel) -> str:
    """Why its logits are not: NaN equals nothing, so that packed rows would be said to differ."""
    bad = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if not bad:
        return "its logits are not finite although its weights are"
    rest = f" and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"its weights hold NaN or infinite values, first in {bad[0]}{rest}; take a copy of the model without them"


def first_sentence(error: Exception) -> str:
    """transformers follows its own with advice and lists of classes."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")


def keeps_shared_prompts(model: PreTrainedModel, plan: RowPlan) -> bool:
    """Return True if rows that share their prompt give the same as apart, by trying; False for another attention, and
    for layers that would have to carry one prompt's state to several rows.
    """
    if plan.layout is not RowLayout.PACKED or plan.attention != attention.NAME or plan.mixers:
        return False
    first, last = FIRST_ROW, 1
    apart = TrialRows(model, ((*first,), (*first[:2], last))).by(plan)
    shared = TrialRows(model, (first[:2], first[2:], (last,)), starts=(0, 2, 2), parents=(-1, 0, 0)).by(plan)
    return _same(shared, apart[[0, 1, 2, 3, 4, 7]])


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Short rows that a model is tried on."""

    model: PreTrainedModel
    rows: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...] = ()
    """The position of each row's first token; empty: 0"""
    parents: tuple[int, ...] = ()
    """As `Pack.parents`; empty: none"""
    images: tuple[tuple[bytes, ...], ...] = ()
    """Of each row; empty: none"""
    vision: Vision | None = None

    @classmethod
    def with_images(cls, model: PreTrainedModel, vision: Vision) -> TrialRows:
        """Places of images among other ids, which are none of its vision."""
        words = [word for word in range(1, 61) if word != vision.image_token]
        images = tuple(tuple(_noise(*size) for size in sizes) for sizes in TRIED_IMAGES)
        rows = []
        for number, of_row in enumerate(images):
            ids = words[number : number + 3]
            for image in of_row:
                ids = [*ids, *[vision.image_token] * vision.read(image).tokens, *words[number + 3 : number + 7]]
            rows.append((*ids, *words[number + 7 : number + 9]))
        return cls(model, tuple(rows), images=images, vision=vision)

    @classmethod
    def of(cls, model: PreTrainedModel, lengths: tuple[int, ...]) -> TrialRows:
        words = min(model.config.get_text_config().vocab_size, 61)
        return cls(model, tuple(tuple((7 * n + length) % words for n in range(length)) for length in lengths))

    @torch.no_grad()
    def alone(self) -> Tensor:
        """Logits [L, V] of one row after the other, as anybody would call the model."""
        return torch.cat([self._alone(number) for number in range(len(self.rows))])

    def _alone(self, number: int) -> Tensor:
        ids = self._tensor(self.rows[number])[None]
        seen: dict[str, Tensor] = {}
        if self.vision is not None and self.images[number]:
            ids, seen = self.vision.look(ids, [self.images[number]])
        logits: Tensor = self.model(input_ids=ids, use_cache=False, **seen).logits[0]
        return logits

    @torch.no_grad()
    def by(self, plan: RowPlan) -> Tensor:
        """Logits [L, V]"""
        return run_rows(lambda arguments: self.model(**arguments).logits, self.part(), plan, vision=self.vision)

    def part(self) -> PackPart:
        starts = self.starts or (0,) * len(self.rows)
        positions = [start + n for start, row in zip(starts, self.rows, strict=True) for n in range(len(row))]
        nothing = self._tensor(())
        lengths = torch.tensor([len(row) for row in self.rows])
        return PackPart(
            ids=self._tensor(token for row in self.rows for token in row),
            positions=self._tensor(positions),
            row_bounds=self._tensor((0, *lengths.tolist())).cumsum(0, dtype=torch.int32),
            predictors=nothing,
            targets=nothing,
            run_lengths=lengths,
            parents=torch.tensor(self.parents) if self.parents else None,
            images=self.images,
        )

    def _tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.long, device=self.model.device)


def _noise(width: int, height: int) -> bytes:
    """An encoded image, the same in every process."""
    from PIL import Image

    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    written = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(written, "PNG")
    return written.getvalue()
