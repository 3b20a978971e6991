"""Traits of a model's computation, found by trying: its attention on packed rows, its output head, prefixes that
rows share.

On the model itself if it is loaded whole; where each rank reads its own slices, on a small copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.rollout_server import TRIED, NoRouters, Routers
from penstock.trainer.engines.fsdp.mixers import mixers_of
from penstock.trainer.engines.fsdp.row_choice import (
    FIRST_ROW,
    MOST_TRIED,
    TrialRows,
    check_causal,
    choose_rows,
    lengths_of,
    unshared_because,
)
from penstock.trainer.engines.fsdp.rows import RowPlan, run_rows
from penstock.trainer.engines.fsdp.small_copy import NoCopy, small_copy
from penstock.trainer.engines.fsdp.vision import Vision
from penstock.trainer.logprobs import Head
from penstock.trainer.packing import RowLayout


@dataclass(frozen=True, slots=True)
class Traits:
    rows: RowPlan
    """The way in which the rows of a pack go through the model."""
    head: Head | None
    """None where the model changes its logits in a way that `Head` does not know: it is then called whole."""
    unshared_because: str
    """The reason why its rows share no prefixes; empty if they do."""
    unrouted_because: str = ""
    """Why no `Routers` can be made of it: it has no experts, or chooses them in another way. Empty if they can."""


def find_traits(model: PreTrainedModel, vision: Vision | None = None) -> Traits:
    """`model` has weights and is on the host; it takes the plan for its rows. Raises `BadJob` if there is none.
    `vision`: it sees images."""
    device = torch.device("cuda" if mixers_of(model) and torch.cuda.is_available() else "cpu")
    module: nn.Module = model
    module.to(device)  # kernels of layers with a state compute on GPUs alone
    try:
        rows = choose_rows(model, vision, _plan_of_copy(model))
        if vision is not None:
            return Traits(
                rows, _head_of(model, rows), "the model sees images", unrouted_because="a model that sees images"
            )
        check_causal(model, rows)
        return Traits(rows, _head_of(model, rows), unshared_because(model, rows), _unrouted_because(model, rows))
    finally:
        module.to("cpu")


def _plan_of_copy(model: PreTrainedModel) -> RowPlan | None:
    """Return the plan of a small copy for a model whose lengths are too long to be tried on itself; rows one by one
    without a copy. None without such lengths."""
    if max(lengths_of(model).values(), default=0) <= MOST_TRIED:
        return None
    try:
        return choose_rows(small_copy(model.config.get_text_config()))
    except NoCopy as error:
        if hasattr(model.config, "vision_config"):  # its rows are not computed one by one
            return None
        because = f"rows longer than its {', '.join(sorted(lengths_of(model)))} cannot be tried: {error}"
        return RowPlan(RowLayout.ALONE, "", unpacked_because=because)


def _unrouted_because(model: PreTrainedModel, rows: RowPlan) -> str:
    try:
        routers = Routers(model)
    except NoRouters as error:
        return str(error)
    part = TrialRows(model, (TRIED,)).part()
    try:
        routers.check(model, lambda given: run_rows(lambda inputs: model(**inputs, **given).logits, part, rows))
    except NoRouters as error:
        return str(error)
    finally:
        routers.unwrap()
    return ""


@torch.no_grad()
def _head_of(model: PreTrainedModel, rows: RowPlan) -> Head | None:
    """Return the model's way to logits, by trying what its settings suggest."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or {name for name, _ in head.named_parameters()} - {"weight", "bias"}:
        return None  # a scale that is learnt (Dory) is 1 in a small copy
    probe, body = TrialRows(model, (FIRST_ROW,)), body_of(model)
    hidden = run_rows(lambda inputs: body(**inputs).last_hidden_state, probe.part(), rows)
    if hidden.shape[-1] != head.in_features:  # a layer lies between (RemBERT)
        return None
    settings = _head_settings(model)
    logits = settings.logits(hidden, head.weight, head.bias)
    return settings if torch.allclose(logits, probe.by(rows).float(), atol=1e-5, rtol=1e-4) else None


def body_of(model: PreTrainedModel) -> Any:
    """Return the part that computes the output head's input. Llama 4 names another part of a larger model as its
    base, so that `base_model` is the model itself."""
    return model.base_model if model.base_model is not model else model.model


def _head_settings(model: PreTrainedModel) -> Head:
    """Gemma caps its logits, Cohere and Falcon-H1 multiply and Granite divides them."""
    config = model.config.get_text_config()
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    scale = math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
