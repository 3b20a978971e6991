"""How a model computes, found by trying: its attention on packed rows, its output head, prompts that rows share.

On the model itself where it is loaded whole; where each rank reads its own slices, on a small copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.trainer.engines.fsdp.attention import (
    PROBE,
    keeps_shared_prompts,
    row_bounds_arguments,
    use_packed_attention,
)
from penstock.trainer.logprobs import Head


@dataclass(frozen=True, slots=True)
class Traits:
    attention: str
    """transformers' name of the attention that is exact on packed rows."""
    head: Head | None
    """None where the model changes its logits in a way that `Head` does not know: it is then called whole."""
    shares_prompts: bool
    """Whether it takes packs whose rows share their prompts."""


def find_traits(model: PreTrainedModel) -> Traits:
    """`model` has weights and is on the host; it takes the attention. Raises `BadJob` where none is exact."""
    attention = use_packed_attention(model)
    return Traits(attention, _head_of(model), keeps_shared_prompts(model))


@torch.no_grad()
def _head_of(model: PreTrainedModel) -> Head | None:
    """How this model makes logits, by trying what its settings suggest."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    ids = torch.tensor([PROBE[0]])
    bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    inputs = {"input_ids": ids, "use_cache": False, **row_bounds_arguments(bounds)}
    hidden = model.base_model(**inputs).last_hidden_state[0]
    expected = model(**inputs).logits[0].float()
    settings = _head_settings(model)
    found = settings.logits(hidden, head.weight, head.bias)
    return settings if torch.allclose(found, expected, atol=1e-5, rtol=1e-4) else None


def _head_settings(model: PreTrainedModel) -> Head:
    """Gemma caps its logits, Cohere multiplies and Granite divides them."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
