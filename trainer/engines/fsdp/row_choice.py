"""The choice of the way of rows through a model (`rows`): once, when the model is loaded, by trying.

The first layout that gives what the rows give alone, by transformers' `eager` attention, is taken. Rows are tried on
both sides of each length in tokens that the model's settings name: many a model decides from the whole call (its
longest row, its largest position) how it computes. A model is refused only where its own forward of one row cannot be
trained on.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.engines.fsdp import attention
from penstock.trainer.engines.fsdp.attention import NoBounds
from penstock.trainer.engines.fsdp.context import PackPart
from penstock.trainer.engines.fsdp.mixers import has_kernels, kinds_of_mixers, mix_rows
from penstock.trainer.engines.fsdp.rows import RowPlan, run_rows
from penstock.trainer.engines.fsdp.vision import Vision
from penstock.trainer.job import BadJob
from penstock.trainer.packing import RowLayout

logger = logging.getLogger(__name__)

LENGTHS = frozenset(
    {
        "attention_chunk_size",
        "attention_window_size",
        "compress_rates",
        "floor_scale",
        "index_block_size",
        "index_topk",
        "keep_window_size",
        "local_attention",
        "log_scaling_n_floor",
        "original_max_position_embeddings",
        "sliding_window",
        "sliding_window_size",
        "window_size",
    }
)
"""Settings from whose number of tokens on a model may compute otherwise: rows of a pack on both sides are tried."""
MOST_TRIED = 64
"""Tokens of such a length that a model is tried on itself, not as a small copy that has it shorter."""
SHORT = (5, 3)
LONG = (70, 90)
"""Lengths of the rows that are tried; long ones where layers carry a state, whose loops take 64 tokens at a time."""
FIRST_ROW = (1, 2, 3, 4, 5)


def places_of_lengths(settings: dict[str, Any], *, named: bool = False) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each (settings, name) of `LENGTHS` in a configuration's ``__dict__`` and the settings inside it. `named`:
    all numbers are meant."""
    for name, value in settings.items():
        is_meant = named or name in LENGTHS
        if isinstance(value, dict):
            yield from places_of_lengths(value, named=is_meant)
        elif is_meant and type(value) is int and value > 0:
            yield settings, name


def lengths_of(model: PreTrainedModel) -> dict[str, int]:
    """Return the lengths that the model's settings name."""
    return {name: owner[name] for owner, name in places_of_lengths(vars(model.config.get_text_config()))}


def _tried_lengths(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the lengths of rows on both sides of each of `lengths_of`, and one of several times the longest."""
    lengths = sorted({length for length in lengths_of(model).values() if length <= MOST_TRIED})
    longer = [length + 3 for length in lengths] + [2 * length + 7 for length in lengths[-1:]]
    return (*(LONG if kinds_of_mixers(model) else SHORT), *longer)


def choose_rows(model: PreTrainedModel, vision: Vision | None = None, copy: RowPlan | None = None) -> RowPlan:
    """`model` has weights and takes the plan. Raises `BadJob` where its own forward fails or gives no numbers.

    One that sees images (`vision`) is tried on rows with some. `copy`: the plan of a small copy, whose lengths are
    shorter; no row may see more than by that.
    """
    probe = TrialRows.with_images(model, vision) if vision else TrialRows.of(model, _tried_lengths(model))
    try:
        model.set_attn_implementation("eager")  # sdpa leaves out caps on scores
        reference = probe.alone()
    except Exception as error:  # a model's own code may raise anything
        raise BadJob(f"{_refusal(model)}: {first_sentence(error)}") from error
    if not torch.isfinite(reference).all():
        raise BadJob(f"{type(model).__name__} cannot be trained: {_not_finite(model)}")
    because = copy.unpacked_because if copy else ""
    if not because:
        packed, because = _packed_plan(model, probe, reference)
        if packed is not None:
            return packed
    alone = (RowLayout.ALONE,)
    layouts = alone if copy and copy.layout is RowLayout.ALONE else (RowLayout.PADDED, *alone)
    return _unpacked_plan(model, probe, reference, because, layouts)


def _refusal(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} cannot be trained by trainer.engine fsdp"


def _packed_plan(model: PreTrainedModel, probe: TrialRows, reference: Tensor) -> tuple[RowPlan | None, str]:
    """(the plan, why there is none)"""
    because, mixers, lengths = "", kinds_of_mixers(model), ", ".join(sorted(lengths_of(model)))
    longer = f", some of them longer than its {lengths}" if lengths else ""
    for row_by_row in ([False] if has_kernels(model) or not mixers else []) + [True] * bool(mixers):
        mix_rows(model, row_by_row=row_by_row)
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
            except ValueError as error:  # it says why
                because = first_sentence(error)
                break
            except Exception as error:  # noqa: BLE001 - as above; the next way may do
                because = f"its packed rows fail ({first_sentence(error)}){longer}"
                break
            if _same(packed, reference):
                return plan, ""
            because = f"its packed rows differ from the same rows alone{longer}"
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


def check_causal(model: PreTrainedModel, plan: RowPlan) -> None:
    """Raises `BadJob` for a model whose logits depend on later tokens, which generation does not have."""
    row, *_ = TrialRows.of(model, SHORT[:1]).rows
    logits = TrialRows(model, (row, (*row[:-1], row[-2]))).by(plan)
    if not _same(logits[: len(row) - 1], logits[len(row) : -1]):
        raise BadJob(
            f"{_refusal(model)}: its logits depend on later tokens. If it has weights of a decoder, set is_decoder to "
            "true in its config.json"
        )


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
    """Return the first sentence of an error: transformers appends advice and lists of classes."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")


def unshared_because(model: PreTrainedModel, plan: RowPlan) -> str:
    """Return why rows share no prefixes; empty if a trial of rows in a tree, one of which continues a branch, agrees
    with separate rows.
    """
    if plan.layout is not RowLayout.PACKED:
        return f"rows are not packed: {plan.unpacked_because}"
    if plan.attention != attention.NAME:
        return f"its attention is {plan.attention}"
    longest = max(_tried_lengths(model))
    (trunk,), cut = TrialRows.of(model, (longest,)).rows, longest - 3
    branch, twig = trunk[2:4], trunk[1:2]
    apart = TrialRows(model, (trunk, (*trunk[:cut], *branch), (*trunk[:cut], *branch[:1], *twig))).by(plan)
    tree = TrialRows(model, (trunk, branch, twig), starts=(0, cut, cut + 1), forks=(-1, cut - 1, longest)).by(plan)
    own = [*range(longest), *range(longest + cut, longest + cut + len(branch)), len(apart) - 1]
    return "" if _same(tree, apart[own]) else "rows in a tree differ from the same rows apart"


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Short rows that a model is tried on."""

    model: PreTrainedModel
    rows: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...] = ()
    """The position of each row's first token; empty: 0"""
    forks: tuple[int, ...] = ()
    """Same as `Pack.forks`; empty: none."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """Images of each row; empty: none."""
    vision: Vision | None = None

    @classmethod
    def with_images(cls, model: PreTrainedModel, vision: Vision) -> TrialRows:
        """Places of images among other ids, which are none of its vision."""
        words = [word for word in range(1, 61) if word != vision.image_token]
        # Width and height of the images of each row.
        sizes = (((60, 90), (90, 60)), ((120, 60),), ())
        images = tuple(tuple(_noise(*size) for size in sizes) for sizes in sizes)
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
        """Return logits [L, V] of the rows, each in a plain call of the model."""
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
            forks=torch.tensor(self.forks) if self.forks else None,
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
