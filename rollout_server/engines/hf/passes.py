"""One pass of a transformers model for several requests: its length, its cache, and the proof that it is exact.

Before the first request a pass of two prompts, then one of a token of each, are compared with what the model computes
for each prompt alone. A model that computes something else, or has layers of another kind, is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.hf.attention import USE_ANOTHER, ForwardStep, Probe, UnsupportedArguments
from penstock.rollout_server.engines.hf.cache import PAGE_TOKENS, KVCache, Layout, Row
from penstock.rollout_server.engines.hf.sampling import Record
from penstock.rollout_server.protocol import Sampling
from penstock.rollout_server.routers import NoRouters, Routers


def tokens_of_a_step(model: Any) -> int:
    """Most tokens of one forward pass, 256 to 2048: a longer pass keeps swaps and other answers waiting."""
    return max(256, min(2048, int(2e9 / model.num_parameters())))


def forward(model: Any, step: ForwardStep, rows: list[Row]) -> torch.Tensor:
    """Logits [rows, V] at the last of the new tokens of `rows`, some of the step's, in its order."""
    return _pass(model, step.ids, step.positions, step, step.last_tokens(rows)).float()


def _pass(
    model: Any, ids: list[int], positions: list[int], step: ForwardStep | Probe, keep: torch.Tensor
) -> torch.Tensor:
    # A mask of four dimensions is taken as it is: none is made, and attention reads the step instead.
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    logits: torch.Tensor = model(**inputs, attention_mask=mask, use_cache=False, logits_to_keep=keep, step=step).logits
    return logits[0]


def routers_of(model: Any) -> Routers:
    """Raises `ValueError` for a model whose routers cannot be recorded."""
    try:
        routers = Routers(model)
        # As alone: how a pass of several requests is laid out changes no router.
        with torch.inference_mode():
            routers.check(model)
    except NoRouters as error:
        raise ValueError(f"rollout.routing_replay: {error}") from error
    return routers


@torch.inference_mode()
def make_cache(model: Any, config: RolloutConfig) -> KVCache:
    """The cache for a model that computes in a batch what it computes alone.

    Raises `ValueError` where the cache is too small for one request, `UnsupportedArguments` for another model.
    """
    if config.kv_cache_tokens < config.max_model_len + PAGE_TOKENS:
        raise ValueError(
            f"rollout.kv_cache_tokens is {config.kv_cache_tokens}: one request of rollout.max_model_len"
            f" {config.max_model_len} needs {config.max_model_len + PAGE_TOKENS}"
        )
    return KVCache(layout_of(model), config.kv_cache_tokens, config.max_model_len)


def layout_of(model: Any) -> Layout:
    """Layout of the model's keys and values. Raises `UnsupportedArguments`."""
    text, probe = model.config.get_text_config(), Probe()
    kinds = list(getattr(text, "layer_types", None) or [])
    _refuse_layers(
        {layer: kind for layer, kind in enumerate(kinds) if kind not in ("full_attention", "sliding_attention")}
    )
    vocab = model.get_input_embeddings().num_embeddings
    contexts = [[(7 * i + 3 * length) % vocab for i in range(length)] for length in (23, 9)]
    try:
        _pass(model, [0], [0], probe, torch.tensor([0]))
        windows = {layer: probe.windows.get(layer) for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
        _refuse_layers({layer: f"window {one}" for layer, one in windows.items() if one != text.sliding_window})
        _compare(model, probe, contexts)
    except UnsupportedArguments:
        raise
    except Exception as error:  # of whatever kind: the model's own code does not take such a pass
        raise UnsupportedArguments(
            f"{type(model).__name__} fails on several requests: {error!r}: {USE_ANOTHER}"
        ) from error
    return probe.layout()


def _refuse_layers(unknown: dict[int, str]) -> None:
    if unknown:
        raise UnsupportedArguments(f"layers {unknown} are unknown to the hf engine: {USE_ANOTHER}")


def _compare(model: Any, probe: Probe, contexts: list[list[int]]) -> None:
    """Prompts in one pass, then one token of each: as one plain pass each. Raises `UnsupportedArguments`."""
    cache = KVCache(probe.layout(), 1024, 64)
    rows = [Row(Record(Sampling(), len(ids)), ids=ids[:-1]) for ids in contexts]
    for row in rows:
        cache.start(row)
        row.new = row.left
    forward(model, ForwardStep(cache), rows)
    for row, ids in zip(rows, contexts, strict=True):
        row.fed, row.new, row.ids = len(ids) - 1, 1, ids
    batched = forward(model, ForwardStep(cache), rows)
    passes = [model(input_ids=torch.tensor([ids]), use_cache=False) for ids in contexts]
    alone = torch.stack([one.logits[0, -1].float() for one in passes])
    apart = (batched.log_softmax(-1) - alone.log_softmax(-1)).abs().max().item()
    # Rounding: of fewer digits than float32 it grows with the deviation of the logits.
    most = 1e-3 if probe.dtype == torch.float32 else 0.25 * max(1.0, alone.std().item())
    if not apart <= most:
        raise UnsupportedArguments(
            f"{type(model).__name__} computes something else for requests in one pass than for each alone (logprobs are"
            f" {apart:g} apart): {USE_ANOTHER}"
        )
