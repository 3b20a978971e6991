"""A causal language model that answers with the logprobs of sampled tokens instead of logits.

    logprob_n = log softmax(logits(position before n) / temperature)[id_n]
    entropy_n = −Σ_v p_v · log p_v        of the same distribution, if it is asked for
    coarse_n                              of the same one: logprobs of the pack's `top_ids` and of the rest, likewise

Only positions that predict a sampled token go through the output head, whose logits exist a tile at a time
(`logprobs`). float32 throughout, whatever the model computes in.

The critic: the model's body with a head of one number, the value of the context before each sampled token.

    V_n = w · h(position before n)          w starts at 0: before it has learnt anything every value is 0

    L_n = max((V_n − G_n)², (clip(V_n, V_old − c, V_old + c) − G_n)²) / 2

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), equation 9; the clipped value loss
is that of OpenAI's implementation (Engstrom et al. 2020, "Implementation Matters in Deep RL", arXiv:2005.12729,
on value function clipping).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from penstock.rollout_server import Routers
from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.images import sees_images
from penstock.trainer.engines.fsdp.context import ContextGroup, PackPart, whole_part
from penstock.trainer.engines.fsdp.lora import Adapter
from penstock.trainer.engines.fsdp.row_choice import first_sentence
from penstock.trainer.engines.fsdp.rows import run_rows
from penstock.trainer.engines.fsdp.shell import ModelShell, NeedsWholeModel, names_of, open_shell
from penstock.trainer.engines.fsdp.traits import Traits, body_of, find_traits
from penstock.trainer.engines.fsdp.vision import Vision
from penstock.trainer.job import BadJob
from penstock.trainer.logprobs import Head, Outputs, coarse_logprobs, entropies, target_logprobs, token_logprobs
from penstock.trainer.packing import Pack
from penstock.weight_sync import HubNames

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """The module that is sharded as a whole: the head runs inside its forward, where its weights are gathered."""

    def __init__(
        self, loaded: LoadedModel, temperature: float, *, with_entropy: bool = False, with_coarse: bool = False
    ) -> None:
        super().__init__()
        self.model = loaded.model
        self.names = loaded.names
        self.shell = loaded.shell
        self.temperature = temperature
        self.with_entropy = with_entropy
        self.with_coarse = with_coarse
        """True if a pack has `top_ids`."""
        self.adapter: Adapter | None = None
        self.context: ContextGroup | None = None
        """Set where other ranks have a part of each pack's tokens."""
        head = loaded.traits.head
        self.head = replace(head, temperature=temperature) if head else None
        """Same as `Traits.head`."""
        self.rows = loaded.traits.rows
        self.vision = loaded.vision
        self.routers: Routers | None = None
        """Routers of a mixture of experts; None: its layers are not wrapped."""
        self.unrouted_because = loaded.traits.unrouted_because
        self.unshared_because = loaded.traits.unshared_because
        """Why packs have no prefix trees."""

    def forward(self, pack: Pack) -> Outputs:
        """Return the outputs of `pack.targets`."""
        part = self.context.part(pack) if self.context else whole_part(pack)
        outputs = self._of_part(part)
        if self.context is None:
            return outputs
        others = (None if one is None else self.context.join(one, part) for one in (outputs.entropy, outputs.coarse))
        return Outputs(self.context.join(outputs.logprobs, part), *others)

    def _of_part(self, part: PackPart) -> Outputs:
        ids = part.top_ids if self.with_coarse else None
        if self.head is None:
            logits = self._run(lambda inputs: self.model(**inputs).logits, part)
            entropy = entropies(logits, self.temperature) if self.with_entropy else None
            coarse = None if ids is None else coarse_logprobs(logits, ids, self.temperature)
            return Outputs(target_logprobs(logits, part.targets, self.temperature), entropy, coarse)
        hidden = self._run(lambda inputs: body_of(self.model)(**inputs).last_hidden_state, part)
        weight, bias, head = _local_head(self.model.get_output_embeddings(), self.head)
        return token_logprobs(hidden, weight, bias, part.targets, head, with_entropy=self.with_entropy, ids=ids)

    def _run(self, call: Callable[[dict[str, Any]], Tensor], part: PackPart) -> Tensor:
        """[N, …] at the places that predict a sampled token"""
        routed = self.routers is not None
        outputs = run_rows(call, part, self.rows, self.context, routed=routed, vision=self.vision)
        return outputs[part.predictors]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model that has taken the plan for its rows, in float32, before it is sharded."""

    model: PreTrainedModel
    traits: Traits
    names: HubNames
    shell: ModelShell | None = None
    """Source of the weights once the model is sharded; None: it has them, on the host."""
    vision: Vision | None = None
    """None: it is trained without images."""


def load_policy(
    model: str, temperature: float, config: TrainerConfig | None = None, *, in_slices: bool = False
) -> Policy:
    """float32 master weights of what learns. No dropout in training either: the engine that sampled had none.

    `config`: with what the algorithm and trainer.lora ask for; None: the model as it is. `in_slices`: as `load_model`.
    """
    loaded = load_model(model, in_slices=in_slices)
    policy = Policy(
        loaded,
        temperature,
        with_entropy=config is not None and config.entropy_bonus != 0,
        with_coarse=config is not None and config.distill.in_loss > 0,
    )
    if config is not None and config.lora.rank:
        policy.adapter = Adapter(loaded.model, config.lora, loaded.names)
        if config.liger and policy.adapter.has_experts:
            raise BadJob("trainer.liger computes experts without their low-rank matrices: set it to false")
        # No master is needed of what does not learn; where the folder has no more bits, none are lost.
        if config.dtype == "bfloat16" and AutoConfig.from_pretrained(model).dtype == torch.bfloat16:
            policy.adapter.lower_base(loaded.model, torch.bfloat16)
    if config is not None and config.liger:
        use_liger(loaded.model)
    if config is not None and config.compile:
        policy.unrouted_because = "trainer.compile compiles the routers too: set one of the two"
    elif not loaded.traits.unrouted_because:
        policy.routers = Routers(loaded.model)
    head = "in tiles" if policy.head is not None else "whole"
    apart = policy.unshared_because
    sharing = f"prefixes not shared ({apart})" if apart else "prefixes shared"
    logger.info("%s: attention %s, head %s, %s, %s", model, policy.rows.attention, head, policy.rows, sharing)
    return policy


def load_reference(model: str, temperature: float, config: TrainerConfig) -> Policy:
    """The model as it is, in the dtype of its arithmetic unless `config` says otherwise: a rounding that each forward
    would make."""
    policy = Policy(load_model(model, in_slices=True), temperature)
    keep_in(policy, getattr(torch, config.kl.reference_dtype or config.dtype))
    return policy


def keep_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone, in place: what a model computes its positions from stays exact."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def load_model(model: str, *, in_slices: bool = False) -> LoadedModel:
    """`in_slices`: without weights if possible, for each rank to read its own slices. Raises `BadJob`."""
    if sees_images(model):  # whole; all of it learns, the vision tower too
        seeing = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        vision = Vision.of(model, seeing.eval())
        return LoadedModel(seeing, find_traits(seeing, vision), names_of(seeing, model), vision=vision)
    if in_slices:
        try:
            shell = open_shell(model)
        except NeedsWholeModel as error:
            logger.warning("%s is loaded whole on every rank: %s", model, error)
        else:
            freeze_choosers(shell.model)
            return LoadedModel(shell.model, shell.traits, shell.names, shell)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    except (ValueError, KeyError) as error:  # of a kind that transformers does not know, or knows no causal model of
        raise BadJob(f"{model} cannot be loaded for training: {first_sentence(error)}") from error
    loaded.eval()
    freeze_choosers(loaded)
    return LoadedModel(loaded, find_traits(loaded), names_of(loaded, model))


def freeze_choosers(model: PreTrainedModel) -> None:
    """Freeze modules that choose keys (DeepSeek-V3.2's indexer), which have no gradient in transformers. It gets no
    moments either: a checkpoint would lack them, and could not be loaded.
    """
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.requires_grad_(False)


def use_liger(model: PreTrainedModel) -> None:
    """Change the model in place, after everything that is tried on the host: Liger's kernels run on GPUs only."""
    if not torch.cuda.is_available():
        raise ValueError("trainer.liger needs a GPU, and torch sees none: set it to false")
    from transformers.integrations.liger import apply_liger_kernel

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


class Critic(nn.Module):
    """Sharded as a whole, like the policy."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model: nn.Module = body_of(loaded.model)
        self.rows = loaded.traits.rows
        self.vision = loaded.vision
        self.shell = loaded.shell
        self.context: ContextGroup | None = None
        """Same as `Policy.context`."""
        self.head = nn.Linear(loaded.model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, pack: Pack) -> Tensor:
        """Values [N], float32, of the contexts before `pack.targets`."""
        part = self.context.part(pack) if self.context else whole_part(pack)
        hidden = run_rows(
            lambda inputs: self.model(**inputs).last_hidden_state, part, self.rows, self.context, vision=self.vision
        )
        # A sum over the one column: FSDP's hook on the output would be lost with a view.
        values = self.head(hidden[part.predictors]).float().sum(-1)
        return self.context.join(values, part) if self.context else values


def load_critic(model: str, config: TrainerConfig, *, in_slices: bool = False) -> Critic:
    """Master weights in float32 unless trainer.critic.dtype says otherwise, the body's from `model`, without dropout.
    The whole critic learns, also with LoRA."""
    loaded = load_model(model, in_slices=in_slices)
    if config.liger:
        use_liger(loaded.model)
    critic = Critic(loaded)
    keep_in(critic, getattr(torch, config.critic.dtype))
    return critic


class ImplicitReward(Policy):
    """The policy's like, which says the logprobs [N] of `pack.targets` alone: what `prime` learns rewards with."""

    def forward(self, pack: Pack) -> Tensor:  # type: ignore[override]
        return super().forward(pack).logprobs


def load_implicit(model: str, temperature: float, config: TrainerConfig) -> ImplicitReward:
    """Load an implicit reward model as `load_critic` does, with the language model's own head."""
    implicit = ImplicitReward(load_model(model, in_slices=True), temperature)
    keep_in(implicit, getattr(torch, config.critic.dtype))
    return implicit
