"""A small copy of a model, with random weights: one layer of each kind (two if they share parameters), thin MLPs, few
experts and words.

Attention keeps its widths in the copy; nothing else moves numbers from one row to another. So it shows how the model
computes, at a small part of its memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.engines.fsdp.row_choice import FIRST_ROW, first_sentence, places_of_lengths

WORDS = 64
SMALL = {"vocab_size": WORDS, "vocab_size_per_layer_input": WORDS, "intermediate_size": 64, "moe_intermediate_size": 64}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
PLACES = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")
"""Settings that list layers by number."""
SEED = 0
"""Seed of the copy's weights: all ranks draw the same."""


class NoCopy(ValueError):
    """No small copy can be made and run; the message says why. It proves nothing about the model."""


def small_copy(config: Any) -> PreTrainedModel:
    """Return a small copy in float32 on the host, with attention `eager`. `config` is not changed. Raises `NoCopy`."""
    whole, config = config, copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(whole)
            text = config.get_text_config()
            _make_small(text, of_each=2 if _shares_layers(model) else 1)
            # It may lie beyond the copy's words; a part of a larger model may compute with it (Gemma 4).
            text.pad_token_id = None if text is config else 0
            shape = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a model's own code may raise anything
        raise NoCopy(f"no small copy of it can be made: {first_sentence(error)}") from error
    if lacking := _kinds(model) - _kinds(shape):
        raise NoCopy(f"a small copy of it would have no {min(lacking)}")
    parameters = sum(parameter.numel() for parameter in shape.parameters())
    if parameters > 1 << 29:
        raise NoCopy(f"a copy would have {parameters / 1e6:.0f} M parameters")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            small = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            small(input_ids=torch.tensor([FIRST_ROW]), use_cache=False)
    except Exception as error:
        raise NoCopy(f"a small copy of it does not run: {first_sentence(error)}") from error
    return small


def _kinds_of_layers(config: Any, layers: int) -> list[Any]:
    """Return the kind of each layer by its settings; equal layers have equal kinds."""
    of_lists = [value for value in _lists(config, layers).values() if all(type(one) in (str, bool) for one in value)]
    of_places = [[layer in places for layer in range(layers)] for places in _places(config).values()]
    dense = getattr(config, "first_k_dense_replace", None) or 0
    shared = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    of_bounds = [[layer < dense for layer in range(layers)], [layer >= shared for layer in range(layers)]]
    own = _own_settings(config)
    kinds = list(zip(*of_lists, *of_places, *of_bounds, [str(own.get(layer)) for layer in range(layers)], strict=True))
    return kinds if len(set(kinds)) > 1 else ["first", *["others"] * (layers - 1)]


def _lists(config: Any, layers: int) -> dict[str, list[Any]]:
    """Settings that have a value for each layer; Falcon-H1's multipliers may only be as many."""
    values = {**vars(config), "layers_block_type": getattr(config, "layers_block_type", None)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == layers and name not in PLACES and not name.endswith("multipliers")
    }


def _places(config: Any) -> dict[str, list[int]]:
    """Settings that list layers by number."""
    return {name: value for name in PLACES if (value := getattr(config, name, None))}


def _own_settings(config: Any) -> dict[int, dict[str, Any]]:
    """Settings of single layers by number (Gemma 4: the size of heads without a window)."""
    return getattr(vars(config).get("_heterogeneity_spec"), "per_layer_overrides", {})


def _kinds(model: PreTrainedModel) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def _shares_layers(model: PreTrainedModel) -> bool:
    """Return True if layers share parameters, which two layers of one kind show."""
    everywhere, once = (len(list(model.named_parameters(remove_duplicate=one))) for one in (False, True))
    return everywhere > once + 1  # the head may be the embedding


def _make_small(config: Any, of_each: int) -> None:
    """Change the configuration in place."""
    _leave_out_layers(config, of_each)
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            setattr(config, name, value)
    for owner, name in places_of_lengths(vars(config)):
        # The most of a length in tokens from which on the model computes otherwise (`rows.LENGTHS`).
        owner[name] = min(owner[name], 16)
    # Smaller weights would hide a difference in the logits, larger ones would show float32's rounding.
    config.initializer_range = config.hidden_size**-0.5
    chosen = max(getattr(config, name, None) or 1 for name in ("num_experts_per_tok", "top_k_experts", "n_group"))
    for name in EXPERTS:
        if isinstance(having := getattr(config, name, None), int):
            setattr(config, name, min(having, 4 * chosen))


def _leave_out_layers(config: Any, of_each: int) -> None:
    """Change the configuration in place, to `of_each` layers of each kind at most."""
    layers = config.num_hidden_layers
    kinds = _kinds_of_layers(config, layers)
    layer_indices = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < of_each]
    for name, of_layers in _lists(config, layers).items():
        if name in vars(config):
            setattr(config, name, [of_layers[index] for index in layer_indices])
    for name, places in _places(config).items():
        setattr(config, name, [new for new, layer in enumerate(layer_indices) if layer in places])
    if dense := getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = sum(layer < dense for layer in layer_indices)
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = sum(layer >= layers - shared for layer in layer_indices)
    own = _own_settings(config)
    config.num_hidden_layers = len(layer_indices)
    if own:
        config.per_layer_config = {new: own[layer] for new, layer in enumerate(layer_indices) if layer in own}
