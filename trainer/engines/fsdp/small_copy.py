"""A small copy of a model, with random weights: one layer of each kind, thin MLPs, few experts and words.

Attention keeps its widths in the copy; nothing else moves numbers from one row to another. So it tells how the model
computes, at a small part of its memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.engines.fsdp.attention import PROBE, first_sentence, refuse_unpackable

MOST_PARAMETERS = 1 << 29
"""Of a copy."""
SMALL = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
SEED = 0
"""Of the copy's weights: all ranks find the same."""


class NoCopy(ValueError):
    """No small copy can be made and run; the message says why. It proves nothing about the model."""


def small_copy(config: Any) -> PreTrainedModel:
    """In float32 on the host, with attention `eager`. Raises `NoCopy`, and `BadJob` where the settings alone say that
    the model cannot be trained packed. `config`: transformers', which stays as it is."""
    config = copy.deepcopy(config)
    try:
        _make_small(config.get_text_config())
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a model's own code may raise anything
        raise NoCopy(f"no small copy of it can be made: {first_sentence(error)}") from error
    refuse_unpackable(shape)
    parameters = sum(parameter.numel() for parameter in shape.parameters())
    if parameters > MOST_PARAMETERS:
        raise NoCopy(f"a copy would have {parameters / 1e6:.0f} M parameters")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            made(input_ids=torch.tensor([PROBE[0]]), use_cache=False)
    except Exception as error:
        raise NoCopy(f"a small copy of it does not run: {first_sentence(error)}") from error
    return made


def _make_small(config: Any) -> None:
    """In place."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["first", *["others"] * (layers - 1)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            setattr(config, name, value)
    # Smaller weights would hide a difference in the logits, larger ones would show float32's rounding.
    config.initializer_range = config.hidden_size**-0.5
    chosen = max(getattr(config, "num_experts_per_tok", None) or 1, getattr(config, "n_group", None) or 1)
    for name in EXPERTS:
        if isinstance(having := getattr(config, name, None), int):
            setattr(config, name, min(having, 4 * chosen))
    config.pad_token_id = None  # it may lie beyond the copy's words
