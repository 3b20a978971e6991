"""Models and weights through mbridge: what is Hugging Face's and what is megatron-core's.

megatron-core's own layers, without Transformer Engine: plain torch operations on rows in a rectangle.

They have neither packed rows nor context or sequence parallelism. Their weights have other names than those with which
mbridge reckons: norms stand alone, and each expert is a module.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.engines.fsdp.shell import folder_of
from penstock.trainer.engines.megatron.settings import SETUP_HINT, check_model
from penstock.trainer.job import BadJob

DATA_PARALLEL = {
    "use_distributed_optimizer": True,
    "grad_reduce_in_fp32": True,
    # Without overlap gradients are reduced once, in finalize_model_grads: no pack needs to know whether it is last.
    "overlap_grad_reduce": False,
}

UNCONVERTED = (NotImplementedError, LookupError, AttributeError, AssertionError, TypeError, ValueError)
"""Exceptions that mbridge raises on tensors or settings that it does not expect."""


class ModelBridge:
    """One model of a run, as many instances of it as `build` is called. megatron's groups must exist."""

    def __init__(self, model: str, config: TrainerConfig, *, transformer_engine: bool) -> None:
        """Raises `BadJob` for a model that mbridge does not know, or that cannot be split so."""
        self.folder = folder_of(model)
        self.hf_config = _read_config(self.folder)
        check_model(self.hf_config, config.parallel, model)
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._on_creation: list[Callable[..., None]] = []
        self._bridge = _open(self.hf_config, self._dtype, model)
        if self.config.num_moe_experts and config.parallel.tensor > 1 and config.parallel.expert == 1:
            # Every tensor rank has all experts, and each expert reads that rank's tokens alone.
            self._on_creation.append(_sum_experts_over_tensor_ranks)
            self._bridge._weight_merge_across_tp = _merged_but_experts(self._bridge._weight_merge_across_tp)
        self._layers = "Transformer Engine's layers" if transformer_engine else "megatron-core's own layers"
        if not transformer_engine:
            # megatron-core trains experts on tensor ranks under sequence parallelism alone.
            if self.config.num_moe_experts and config.parallel.tensor > 1 and not PLAIN["sequence_parallel"]:
                raise BadJob(
                    f"{model} has experts, and without Transformer Engine trainer.parallel.tensor is 1: split them "
                    f"with trainer.parallel.expert; {SETUP_HINT}"
                )
            use_local_layers(self._bridge)
        # No dropout: the engine that sampled had none. Gradients are summed: the divisor of the loss counts all ranks.
        exact = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True}
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        self._bridge.set_extra_args(**exact, **(recompute if config.recompute else {}))

    @property
    def config(self) -> Any:
        """megatron's `TransformerConfig`, which all models of this bridge share."""
        return self._bridge.config

    def build(self, *, trained: bool) -> list[nn.Module]:
        """This rank's part of the model, with weights; wrapped for data parallelism if it is trained. Raises
        `BadJob` where mbridge has no place for one of its tensors."""
        try:
            models: list[nn.Module] = self._bridge.get_model(
                wrap_with_ddp=trained,
                bf16=self._dtype == torch.bfloat16,
                use_cpu_initialization=self.config.use_cpu_initialization,
                data_parallel_random_init=False,
                ddp_config=dict(DATA_PARALLEL),
                post_model_creation_callbacks=self._on_creation,
            )
            self.load(models, self.folder)
        except UNCONVERTED as error:
            raise BadJob(
                f"{self.folder} is of type {self.hf_config.model_type}, which mbridge does not convert into "
                f"{self._layers}: {_first_line(error)}; trainer.engine fsdp takes it"
            ) from error
        # From here on values keep the dtype that they are given: masters and moments are float32 in a bfloat16 model.
        self._bridge.dtype = None
        return models

    def save_settings(self, folder: Path) -> None:
        """Write the files of a Hugging Face folder other than weights and tokenizer."""
        self.hf_config.save_pretrained(folder)
        generation = self.folder / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)

    @torch.no_grad()
    def load(
        self, models: list[nn.Module], folder: Path, take: Callable[[nn.Parameter, Tensor], None] | None = None
    ) -> None:
        """Weights from a Hugging Face folder with safetensors, a tensor at a time. A collective.

        `take` gets each parameter's, in float32, in place of the parameter.
        """
        for model in models:
            with _received_by(take, model) if take else nullcontext():
                self._bridge.load_weights([model], str(folder), memory_efficient=True)

    @torch.no_grad()
    def export(
        self, models: list[nn.Module], value_of: Callable[[nn.Parameter], Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on all ranks, in the same order. A collective for every tensor.

        `value_of`: what is converted in place of a parameter, of its shape; asked when it is the parameter's turn, so
        that one is there at a time. A tied embedding comes once: with several stages the last one has a copy of it.
        """
        seen: set[str] = set()
        with _sent_instead(value_of) if value_of else nullcontext():
            for name, tensor in self._bridge.export_weights(models):
                if name not in seen:
                    seen.add(name)
                    yield name, tensor


@contextmanager
def _sent_instead(value_of: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """mbridge's stages send each other other values than their parameters. A parameter keeps its data: that of another
    dtype would make torch forget the hooks by which megatron collects gradients."""
    from mbridge.core import bridge

    send = bridge.broadcast_from_megatron_pp

    def send_value(tensor: Tensor | None) -> Tensor:
        value = tensor
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value_of(tensor), requires_grad=False)
            # megatron's notes: the dimension of its split, and whether it is an expert's
            vars(value).update(vars(tensor))
        sent: Tensor = send(value)
        return sent

    bridge.broadcast_from_megatron_pp = send_value
    try:
        yield
    finally:
        bridge.broadcast_from_megatron_pp = send


@contextmanager
def _received_by(take: Callable[[nn.Parameter, Tensor], None], model: Any) -> Iterator[None]:
    """Hand to `take` each tensor that mbridge copies into an entry of the model's state."""
    targets = {
        name: _Target.of(parameter, take)
        for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False)
    }
    buffers = {name: one for name, one in model.state_dict().items() if name not in targets}
    model.state_dict = lambda: {**buffers, **targets}
    try:
        yield
    finally:
        del model.state_dict


class _Target(Tensor):
    """A tensor of a parameter's shape, in float32 and without its memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    receive: Callable[[Tensor], None]

    @classmethod
    def of(cls, parameter: nn.Parameter, take: Callable[[nn.Parameter, Tensor], None]) -> _Target:
        target = torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape).as_subclass(cls)
        target.receive = partial(take, parameter)
        return target

    def copy_(self, source: Tensor, non_blocking: bool = False) -> _Target:
        self.receive(source)
        return self


def unwrapped(model: Any) -> Any:
    """Return megatron's `GPTModel` inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _sum_experts_over_tensor_ranks(model: nn.Module, **about: Any) -> None:
    """Before the model is wrapped: the wrapper then adds up an expert's gradient over all ranks that have it, which
    megatron-core does by itself if there are expert ranks."""
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _merged_but_experts(merge: Callable[[str, list[Tensor], Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return `merge` for an mbridge `Bridge`, without the experts: it takes the tensor ranks' copies for parts."""

    def merged(name: str, weights: list[Tensor], parameter: Tensor) -> Tensor:
        return weights[0] if ".mlp.experts." in name else merge(name, weights, parameter)

    return merged


def _open(hf_config: Any, dtype: torch.dtype, model: str) -> Any:
    from mbridge import AutoBridge

    try:
        bridge = AutoBridge.from_config(hf_config, dtype=dtype)
    except ValueError as error:
        known = ", ".join(sorted(AutoBridge.list_supported_models()))
        raise BadJob(
            f"{model} is of type {hf_config.model_type}, which mbridge does not convert; trainer.engine megatron knows "
            f"{known}"
        ) from error
    except UNCONVERTED as error:
        raise BadJob(
            f"{model} is of type {hf_config.model_type}, whose settings mbridge does not take: {_first_line(error)}; "
            "trainer.engine fsdp does"
        ) from error
    # mbridge writes a tied model's head into a table of the class, where the next model would find it.
    tied = getattr(hf_config, "tie_word_embeddings", False)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    bridge._DIRECT_MAPPING = {**bridge._DIRECT_MAPPING, "output_layer.weight": head}
    return bridge


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _read_config(folder: Path) -> Any:
    """Return the config with `rope_theta` as mbridge reads it: transformers 5 keeps it in `rope_parameters`. Raises
    `BadJob` for scaled rotary embeddings, which mbridge does not find in transformers 5 and would leave out."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise BadJob(
            f"{folder} scales its rotary embedding ({rope['rope_type']}), which trainer.engine megatron does not take "
            "over; trainer.engine fsdp does"
        )
    if not hasattr(config, "rope_theta") and "rope_theta" in rope:
        config.rope_theta = rope["rope_theta"]
    return config


PLAIN = {
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
    "moe_grouped_gemm": False,
}
"""Every fused kernel off: they are compiled for GPUs."""
LAYER = "model.layers.{layer_number}."


def use_local_layers(bridge: Any) -> None:
    """Let an mbridge `Bridge` build its model of these layers and know their weights."""
    import torch

    bridge.set_extra_args(**PLAIN, use_cpu_initialization=not torch.cuda.is_available())
    bridge._get_transformer_layer_spec = lambda vp_stage=None: _layer_spec(bridge.config)
    norm = {"pre_mlp_layernorm.weight": [f"{LAYER}post_attention_layernorm.weight"]}
    bridge._MLP_MAPPING = {**bridge._MLP_MAPPING, **norm}
    bridge._OTHER_MAPPING = {**bridge._OTHER_MAPPING, "input_layernorm.weight": [f"{LAYER}input_layernorm.weight"]}
    if bridge.config.num_moe_experts is not None:
        _name_experts_as_grouped(bridge)


def _layer_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


def _name_experts_as_grouped(bridge: Any) -> None:
    """mbridge recognises experts by the names that they have in Transformer Engine's grouped layer."""
    local_to_global = bridge._weight_name_mapping_mcore_local_to_global

    def mapped(model: Any, consider_ep: bool = True) -> dict[str, str]:
        own = bridge.config.num_moe_experts // bridge.mpu.ep_size
        first = own * bridge.mpu.ep_rank if consider_ep else 0
        return {local: grouped_name(name, first) for local, name in local_to_global(model, consider_ep=False).items()}

    bridge._weight_name_mapping_mcore_local_to_global = mapped


def grouped_name(name: str, first_expert: int) -> str:
    """``….experts.local_experts.1.linear_fc1.weight`` → ``….experts.linear_fc1.weight5`` for `first_expert` 4; other
    names as they are."""
    match = re.fullmatch(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name)
    if match is None:
        return name
    prefix, number, layer = match.groups()
    return f"{prefix}.{layer}.weight{first_expert + int(number)}"
