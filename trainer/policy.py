"""A causal language model that answers with the logprobs of sampled tokens instead of logits.

    logprob_n = log softmax(logits(position before n) / temperature)[id_n]
    entropy_n = −Σ_v p_v · log p_v        of the same distribution, where it is asked for

Only positions that predict a sampled token go through the output head, in chunks whose logits are computed again in the
backward, so that logits of a whole pack never exist together. float32 throughout, whatever the model computes in.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.attention import PROBE, row_bounds_arguments, use_packed_attention
from penstock.trainer.packing import Pack

CHUNK_ELEMENTS = 1 << 24
"""Logits that exist at a time: 64 MiB in float32."""

logger = logging.getLogger(__name__)


class Outputs(NamedTuple):
    """What the policy says about N sampled tokens, float32."""

    logprobs: Tensor
    """[N]"""
    entropy: Tensor | None
    """[N] None where it is not asked for"""


class Policy(nn.Module):
    """The module that is sharded as a whole: the head runs inside its forward, where its weights are gathered."""

    def __init__(self, model: PreTrainedModel, temperature: float, *, with_entropy: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.with_entropy = with_entropy
        self.chunked = _head_is_plain(model)
        """False where the model changes its logits after the head (soft-capping, scaling): it is then called whole."""

    def forward(self, pack: Pack) -> Outputs:
        """Of `pack.targets`."""
        arguments = row_bounds_arguments(pack.row_bounds)
        inputs = {"input_ids": pack.ids[None], "position_ids": pack.positions[None], "use_cache": False, **arguments}
        if not self.chunked:
            logits = self.model(**inputs).logits[0]
            return self._outputs(logits[pack.predictors], pack.targets)
        hidden = self.model.base_model(**inputs).last_hidden_state[0]
        return self._in_chunks(hidden[pack.predictors], pack.targets)

    def _in_chunks(self, hidden: Tensor, targets: Tensor) -> Outputs:
        size = max(1, CHUNK_ELEMENTS // self.model.config.vocab_size)
        if len(targets) <= size:
            return self._head_outputs(hidden, targets)
        parts = [
            checkpoint(self._head_outputs, h, t, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        entropy = torch.cat([part.entropy for part in parts]) if self.with_entropy else None
        return Outputs(torch.cat([part.logprobs for part in parts]), entropy)

    def _head_outputs(self, hidden: Tensor, targets: Tensor) -> Outputs:
        return self._outputs(self.model.get_output_embeddings()(hidden), targets)

    def _outputs(self, logits: Tensor, targets: Tensor) -> Outputs:
        entropy = entropies(logits, self.temperature) if self.with_entropy else None
        return Outputs(target_logprobs(logits, targets, self.temperature), entropy)


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [N, V], targets [N] → logprobs [N], float32."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def entropies(logits: Tensor, temperature: float) -> Tensor:
    """logits [N, V] → [N], float32: logsumexp(z) − Σ p · z"""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def load_policy(model: str, temperature: float, *, with_entropy: bool = False) -> Policy:
    """float32 master weights. No dropout in training either: the engine that sampled had none."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    attention = use_packed_attention(loaded)
    policy = Policy(loaded, temperature, with_entropy=with_entropy)
    logger.info("%s: attention %s, head %s", model, attention, "in chunks" if policy.chunked else "whole")
    return policy


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    ids = torch.tensor([PROBE[0]])
    bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    inputs = {"input_ids": ids, "use_cache": False, **row_bounds_arguments(bounds)}
    head = model.get_output_embeddings()
    if head is None:
        return False
    hidden = model.base_model(**inputs).last_hidden_state
    return torch.allclose(head(hidden).float(), model(**inputs).logits.float(), atol=1e-5, rtol=1e-4)
