"""The models of a trainer process: the policy, and where the algorithm needs them a reference policy and a critic.

How much arithmetic a step is, and what share of the device's peak that was (model FLOPs utilisation).

    forward of L tokens = 2 · P · L + 2 · heads · Σ_layers D · Σ_r L_r²      P: weights of matrices, half of each square
    forward and backward = 3 · forward; 2 · forward where only LoRA's matrices need gradients of weights

Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B; of the update alone, without scoring and without what is
computed again in the backward. Head and embedding: the head for sampled tokens only, the embedding is not a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.rollout_server import LayerLoad
from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import TrainerConfig
from penstock.trainer.logprobs import Outputs
from penstock.trainer.packing import Pack, RowLayout
from penstock.trainer.ranks.distributed import Ranks
from penstock.weight_sync import Shard


class PackLoss(Protocol):
    """Called by the engine for every pack of a minibatch: (pack, what the policy says) → the pack's loss, summed."""

    def __call__(self, pack: Pack, outputs: Outputs) -> Tensor: ...


class ValueLoss(Protocol):
    """The same for the critic: (pack, its values [N]) → the pack's loss, summed."""

    def __call__(self, pack: Pack, values: Tensor) -> Tensor: ...


class Engine(Protocol):
    """The interface of a training backend. Every method is a collective over the ranks.

    Ranks of one replica are given the same packs and return the same numbers.
    """

    limits: ModelLimits
    temperature: float
    """Logprobs are those of logits / temperature."""
    kl_coefficient: float
    """Coefficient of trainer.kl.in_reward after its adaptation; a checkpoint stores it."""

    @property
    def flops(self) -> Flops | None:
        """Return the operations of the model; None if they are not counted."""

    @property
    def has_critic(self) -> bool: ...

    @property
    def shares_prefixes(self) -> bool:
        """True if the packs' rows may share their prefixes, see `prefix_trees`."""

    @property
    def row_layout(self) -> RowLayout:
        """The layout of a pack's rows."""

    def take_router_loads(self) -> RouterLoads | None:
        """Return the loads of the updates since the last call, of all ranks of this replica; None if no experts are
        counted."""

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Logprobs [N] of each pack under the present weights, without gradient."""

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Return logprobs [N] of each pack under the weights before training."""

    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        """The critic's values [N] of each pack; an implicit reward model's logprobs."""

    def update(self, packs: Sequence[Pack], loss: PackLoss, divisor: float, step: int) -> Update:
        """Gradients of sum(loss) / `divisor` over all packs of all ranks, clipped, then one optimizer update."""

    def update_critic(self, packs: Sequence[Pack], loss: ValueLoss, divisor: float) -> Update:
        """The same for the critic."""

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the host, a copy) on rank 0; nothing on the others. What LoRA learned is
        in them."""

    def local_shards(self, dtype: torch.dtype) -> list[Shard] | None:
        """This rank's part of every tensor that `weights` gives, not copied and not yet cast: no collective. None where
        the parts are no ranges of the tensors' bytes; `gathered_weights` is used then."""

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on all ranks, in the same order: the engine's own tensors, or made for this
        call, on its device and in its dtype. To be read to its end, and not changed. What LoRA learned is in them."""

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        """The settings as peft's ``LoraConfig.to_dict()``; None if the whole model learns."""

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's tensors like `weights`, in float32 under peft's names."""

    @property
    def state_bytes(self) -> int:
        """About what this rank writes into a checkpoint: weights that learn, and their two moments."""

    def begin_save(self, path: Path) -> Future[Any]:
        """Copy weights and moments, and write them into the folder `path` in a thread. The future is done when all
        ranks wrote."""

    def load(self, checkpoint: Path, written_by: int) -> None:
        """Restores what `begin_save` of `written_by` ranks wrote; the number of ranks may be another one now. Raises
        `ValueError` if another engine wrote it."""

    def save_model(self, folder: Path) -> None:
        """Write a Hugging Face folder without tokenizer; rank 0 does. What LoRA learned is added to the weights."""

    def save_adapter(self, folder: Path) -> None:
        """Write what LoRA learned as a folder that peft loads; rank 0 does."""


@runtime_checkable
class SharingEngine(Protocol):
    """An `Engine` that shares its devices with rollout engines, in turns. Between steps, in the torch thread."""

    @property
    def turn_bytes(self) -> int:
        """Return the most bytes that this rank keeps on its device in a turn; what it computes with comes on top on
        CPUs.
        """

    @property
    def used_bytes(self) -> int:
        """Return the used bytes of its device, now or as last measured; may be asked from another thread in the middle
        of a step.
        """

    def leave_device(self) -> None:
        """Move what stays between steps to host memory, and free the device."""

    def enter_device(self) -> None:
        """The reverse; values are the same, bit for bit."""


@dataclass(frozen=True, slots=True)
class RouterLoads:
    """The distribution of tokens by the routers of a mixture."""

    layers: Sequence[LayerLoad]
    has_aux_loss: bool
    """The model was pre-trained with a loss that evens out the load of its experts."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update."""

    grad_norm: float
    """Before clipping, over all ranks."""
    lr: float
    skipped: bool
    """Loss or gradient was not finite, on whichever rank: weights and moments are as before, on all."""
    loss: float = 0.0
    """sum(loss) / divisor over all ranks."""


PEAK_TFLOPS = {
    **{"H200 NVL": 835.0, "H200": 989.0, "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0},
    **{"B200": 2250.0, "A100": 312.0, "L40S": 362.0, "MI300X": 1307.0},
}
"""Dense bfloat16, by a part of the device's name, from the vendors' data sheets (SXM variants where none is named). The
first that fits counts."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating point operations of one model."""

    body: int
    """Weights of matrices inside the layers."""
    head: int
    attention: int
    """heads · Σ D over the layers"""
    learns_all: bool

    @classmethod
    def of(cls, model: PreTrainedModel, *, learns_all: bool) -> Flops | None:
        """Before the model is sharded. None for layers with a state, whose arithmetic is not that of attention, and for
        models that see images."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        if hasattr(model.config, "vision_config") or not hasattr(config, "num_attention_heads"):
            return None  # a tower of images reads patches, not tokens
        body = _matrices(model, head)
        if body is None:
            return None
        attention = config.num_attention_heads * sum(head_sizes(config))
        return cls(body, head.weight.numel() if head else 0, attention, learns_all)

    def of_update(self, tokens: int, sampled: int, squares: int) -> float:
        """Forward and backward of `tokens`, of which `sampled` go through the head; `squares` is Σ_r L_r²."""
        forward = 2 * (self.body * tokens + self.head * sampled + self.attention * squares)
        return (3 if self.learns_all else 2) * forward


def _matrices(model: PreTrainedModel, head: nn.Module | None) -> int | None:
    """Weights of matrices inside the layers that one token meets: of a mixture the router and the token's experts.

    None if there are convolutions, which are those of a layer with a state, and where a token's experts are not
    known.
    """
    routed: int = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
    total = 0
    for part in model.modules():
        own = [(name, one) for name, one in part.named_parameters(recurse=False) if part is not head]
        stacked = [one for _, one in own if one.dim() == 3]  # all experts of a layer, or a convolution's kernels
        if stacked and (not routed or isinstance(part, nn.Conv1d)):
            return None
        if stacked:
            total += sum(one.numel() // len(one) * routed for one in stacked)
        elif not isinstance(part, nn.Embedding):
            total += sum(one.numel() for name, one in own if name == "weight" and one.dim() == 2)
    return total


def head_sizes(config: Any) -> list[int]:
    """D of each layer; Gemma 4 has another one in layers without a window."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return [getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads for one in layers]


def peak_tflops(configured: float | None, device: torch.device, dtype: str) -> float | None:
    """Return the peak of one rank's device; None if unknown."""
    if configured is not None or device.type != "cuda" or dtype != "bfloat16":
        return configured
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def update_speed(
    flops: Flops | None, config: TrainerConfig, ranks: Ranks, trained: tuple[int, int, int], seconds: float
) -> dict[str, float]:
    """Arithmetic of an update per second and rank, and as a share of the peak if that is known. `trained`: as
    `Flops.of_update` takes them."""
    if flops is None:
        return {}
    tflops = flops.of_update(*trained) / max(seconds, 1e-9) / ranks.world / 1e12
    dtype = config.resolve_dtype(on_gpu=ranks.device.type == "cuda").dtype
    peak = peak_tflops(config.peak_tflops, ranks.device, dtype)
    return {"tflops_per_s": tflops, **({"mfu": tflops / peak} if peak else {})}
