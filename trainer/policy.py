"""A causal language model that answers with the logprobs of sampled tokens instead of logits.

    logprob_n = log softmax(logits(position before n) / temperature)[id_n]
    entropy_n = −Σ_v p_v · log p_v        of the same distribution, where it is asked for

Only positions that predict a sampled token go through the output head, whose logits exist a tile at a time
(`logprobs`). float32 throughout, whatever the model computes in.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from penstock.trainer.attention import PROBE, keeps_shared_prompts, row_bounds_arguments, use_packed_attention
from penstock.trainer.config import TrainerConfig
from penstock.trainer.context import Context, Part, whole
from penstock.trainer.logprobs import Head, token_logprobs
from penstock.trainer.lora import Adapter
from penstock.trainer.packing import Pack

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
        self.adapter: Adapter | None = None
        self.context: Context | None = None
        """Set where other ranks have a part of each pack's tokens."""
        self.head = _head_of(model, temperature)
        """None where the model changes its logits in a way that `Head` does not know: it is then called whole."""
        self.shares_prompts = keeps_shared_prompts(model)
        """Whether it takes packs whose rows share their prompts."""

    @property
    def chunked(self) -> bool:
        return self.head is not None

    def forward(self, pack: Pack) -> Outputs:
        """Of `pack.targets`."""
        part = self.context.part(pack) if self.context else whole(pack)
        logprobs, entropy = self._of_part(part)
        if self.context is None:
            return Outputs(logprobs, entropy)
        joined = self.context.join(logprobs, part.counts)
        return Outputs(joined, None if entropy is None else self.context.join(entropy, part.counts))

    def _of_part(self, part: Part) -> tuple[Tensor, Tensor | None]:
        inputs = model_inputs(part, self.context)
        if self.head is None:
            logits = self.model(**inputs).logits[0][part.predictors]
            entropy = entropies(logits, self.temperature) if self.with_entropy else None
            return target_logprobs(logits, part.targets, self.temperature), entropy
        hidden = self.model.base_model(**inputs).last_hidden_state[0][part.predictors]
        weight, bias, head = _local_head(self.model.get_output_embeddings(), self.head)
        return token_logprobs(hidden, weight, bias, part.targets, head, with_entropy=self.with_entropy)


def model_inputs(part: Part, context: Context | None) -> dict[str, Any]:
    """Keyword arguments of a transformers model for one part of a pack."""
    arguments = row_bounds_arguments(part.row_bounds, part.parents)
    if context is not None:
        arguments["context"] = context
    return {"input_ids": part.ids[None], "position_ids": part.positions[None], "use_cache": False, **arguments}


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [N, V], targets [N] → logprobs [N], float32."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def entropies(logits: Tensor, temperature: float) -> Tensor:
    """logits [N, V] → [N], float32: logsumexp(z) − Σ p · z"""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def load_policy(model: str, temperature: float, config: TrainerConfig | None = None) -> Policy:
    """float32 master weights of what learns. No dropout in training either: the engine that sampled had none.

    `config`: with what the algorithm and trainer.lora ask for; None: the model as it is, for a reference.
    """
    loaded = load_model(model)
    policy = Policy(loaded, temperature, with_entropy=config is not None and config.entropy_bonus != 0)
    if config is not None and config.lora.rank:
        policy.adapter = Adapter(loaded, config.lora)
        # No master is needed of what does not learn; where the folder has no more bits, none are lost.
        if config.dtype == "bfloat16" and AutoConfig.from_pretrained(model).dtype == torch.bfloat16:
            policy.adapter.lower_base(loaded, torch.bfloat16)
    if config is not None and config.liger:
        use_liger(loaded)
    implementation = loaded.config._attn_implementation
    logger.info("%s: attention %s, head %s", model, implementation, "in tiles" if policy.chunked else "whole")
    return policy


def load_model(model: str) -> PreTrainedModel:
    """In float32, on the host, with an attention that keeps packed rows apart."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    use_packed_attention(loaded)
    return loaded


def use_liger(model: PreTrainedModel) -> None:
    """In place, after everything that is tried on the host: its kernels run on GPUs only."""
    if not torch.cuda.is_available():
        raise ValueError("trainer.liger needs a GPU, and torch sees none: set it to false")
    apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def _local_head(head: Any, settings: Head) -> tuple[Tensor, Tensor | None, Head]:
    """(weight, bias, settings) of the rows that this rank has."""
    weight, bias = head.weight, getattr(head, "bias", None)
    if not isinstance(weight, DTensor):
        return weight, bias, settings
    local, mesh = weight.to_local(), weight.device_mesh
    if weight.placements[0].is_shard():
        settings = replace(settings, first=mesh.get_local_rank() * len(local), group=mesh.get_group())
    return local, bias.to_local() if isinstance(bias, DTensor) else bias, settings


@torch.no_grad()
def _head_of(model: PreTrainedModel, temperature: float) -> Head | None:
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
    return replace(settings, temperature=temperature) if torch.allclose(found, expected, atol=1e-5, rtol=1e-4) else None


def _head_settings(model: PreTrainedModel) -> Head:
    """Gemma caps its logits, Cohere multiplies and Granite divides them."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
