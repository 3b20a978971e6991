"""Layouts of a trainer's ranks for a number of GPUs: the memory of a device, and the bytes that travel for a pack.

With N ranks in H = parallel.replicate sets of F = N/H, E = parallel.expert, C = parallel.context, b bytes of the
arithmetic, P parameters of which Pe are the experts', L layers of which Le have experts, k experts of a token, hidden
width h, query and key-value widths q and kv, and T tokens of a rank's part of a pack, a rank receives

    gathers      2·b·G            G = (P − Pe)·(1 − 1/F) + Pe/E·(1 − E/F)       weights, in the forward and the backward
    reduction    4·G              gradients in float32; with LoRA those of its matrices
    all-to-all   m·b·T·Le·k·h·(1 − 1/E)      m = 4: dispatch and combine, forward and backward; 6 with recompute: true
    attention    4·b·T·L·(q + kv)·(1 − 1/C)      tokens for heads and back, forward and backward

What is gathered and reduced is that of torch/distributed/fsdp/_fully_shard, what is exchanged that of
`penstock.trainer.engines.fsdp`. Memory is `rank_memory`'s sum. Layouts fit or do not by these sums; among those that
fit, time is only estimated, for an order. Layouts of trainer.parallel.tensor are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.memory_checks import PROCESS, USABLE, memory_changes
from penstock.deploy.preflight.model_shape import ModelShape
from penstock.deploy.preflight.rank_memory import (
    BYTES,
    MASTER,
    context_bytes,
    device_parts,
    learning_parameters,
    rank_bytes,
)
from penstock.deploy.recipe_tree import ConfigError
from penstock.trainer import TrainerConfig

MACHINE = 8
"""GPUs of a machine."""
FLOPS, WITHIN, BETWEEN = 4e14, 3e11, 5e10
"""Products of a GPU per second, and bytes that it receives within and between machines: two fifths of an H100's peak,
two thirds of its NVLink, and a card of 400 Gb/s. They order layouts and bound nothing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay the trainer over its GPUs."""

    trainer: TrainerConfig
    parts: Mapping[str, float]
    """Bytes of a device by part."""
    tokens: float
    """Tokens of a rank's part of a pack."""
    received: float
    """Bytes of weights and gradients that a rank receives for a pack."""
    exchanged: float
    """Bytes of tokens that it receives from the ranks of the other experts."""
    token_s: float
    """Estimate of a rank's seconds per token, for an order."""
    groups_per_step: int
    """Ranks train whole groups: a step needs one for each copy of the model, or as many as the recipe has."""

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())

    def words(self, config: RunConfig) -> str:
        """Return the settings in which it differs from `config`, as a command takes them."""
        sizes, before = self.trainer.parallel, config.trainer.parallel
        split, memory = ("replicate", "expert", "context"), ("ranks", "recompute", "offload", "activation_offload")
        changes = {f"trainer.parallel.{name}": (getattr(sizes, name), getattr(before, name)) for name in split}
        changes |= {f"trainer.{name}": (getattr(self.trainer, name), getattr(config.trainer, name)) for name in memory}
        changes["groups_per_step"] = self.groups_per_step, config.groups_per_step
        return " ".join(f"{key}={str(now).lower()}" for key, (now, was) in changes.items() if now != was)

    @property
    def simulation(self) -> str:
        """Return the trainer of `penstock simulate` with this layout, at the estimated speed."""
        each = self.trainer.parallel.context
        ranks, speed = self.trainer.ranks // each, each / self.token_s
        return f"trainer.ranks={ranks} trainer.gpus={each} trainer.tokens_per_s={speed:.0f}"


def find_layouts(config: RunConfig, shape: ModelShape, gpus: int, gpu_bytes: int) -> list[Layout]:
    """Return the layouts over `gpus` devices of `gpu_bytes` that fit, each with the best settings of recompute and
    offload: those first that keep the states on the device, and of these the fastest by `Layout.token_s`. If none
    fits, the one that needs the least memory.

    Raises `ConfigError` for an engine or a split that has no such layouts.
    """
    if config.trainer.engine != "fsdp" or config.trainer.parallel.tensor > 1:
        raise ConfigError("--gpus: layouts are those of trainer.engine fsdp with trainer.parallel.tensor 1")
    limit = USABLE * gpu_bytes
    layouts = [_layout(config, shape, trainer) for trainer in _candidates(config.trainer, shape, gpus)]
    fitting = sorted((one for one in layouts if one.bytes <= limit), key=_cost)
    # Of layouts that differ in recompute or offload alone the first one stays.
    first = {one.trainer.parallel: one for one in reversed(fitting)}
    return sorted(first.values(), key=_cost) or [min(layouts, key=lambda one: one.bytes)]


def _candidates(trainer: TrainerConfig, shape: ModelShape, gpus: int) -> Iterator[TrainerConfig]:
    for replicate in _powers(gpus):
        together = gpus // replicate
        for expert in _powers(together) if shape.experts else [1]:
            if shape.expert_count % expert:
                continue
            for context in (trainer.parallel.context * more for more in (1, 2, 4, 8)):
                if together % context == 0 and shape.heads % context == 0:
                    sizes = {"replicate": replicate, "expert": expert, "context": context}
                    yield from _memory_variants(trainer, sizes, gpus)


def _memory_variants(trainer: TrainerConfig, sizes: Mapping[str, int], gpus: int) -> Iterator[TrainerConfig]:
    parallel = trainer.parallel.model_copy(update=dict(sizes))
    laid = trainer.model_copy(update={"ranks": gpus, "parallel": parallel})
    for update in ({}, *memory_changes(laid).values()):
        changed = laid.model_copy(update=dict(update))
        # The experts' weights would be copied too: the engine refuses it.
        if sizes["expert"] == 1 or not changed.activation_offload or changed.recompute is True:
            yield changed


def _powers(number: int) -> list[int]:
    """The powers of two that divide `number`."""
    return [1 << exponent for exponent in range(number.bit_length()) if number % (1 << exponent) == 0]


def _layout(config: RunConfig, shape: ModelShape, trainer: TrainerConfig) -> Layout:
    laid = config.model_copy(update={"trainer": trainer})
    parts = device_parts(rank_bytes(shape, laid, on_gpu=True), trainer) | {PROCESS: context_bytes(trainer)}
    resolved = trainer.resolve_dtype(on_gpu=True)
    tokens = max(trainer.micro_batch_tokens, config.rollout.max_model_len) / trainer.parallel.context
    received, exchanged = received_bytes(shape, resolved), exchanged_bytes(shape, resolved, tokens)
    seconds = _pack_s(shape, resolved, tokens, received, exchanged)
    groups = max(config.groups_per_step, trainer.ranks // trainer.parallel.context)
    return Layout(trainer, parts, tokens, received, exchanged, seconds / tokens, groups)


def received_bytes(shape: ModelShape, trainer: TrainerConfig) -> float:
    """Return the bytes of weights and gradients that a rank receives for a pack."""
    together, expert = trainer.ranks / trainer.parallel.replicate, trainer.parallel.expert
    others = (shape.parameters - shape.experts) * (1 - 1 / together) + shape.experts / expert * (1 - expert / together)
    learning = learning_parameters(shape, trainer) / shape.parameters
    return (2 * BYTES[trainer.dtype] + MASTER * learning) * others


def exchanged_bytes(shape: ModelShape, trainer: TrainerConfig, tokens: float) -> float:
    """Return the bytes of tokens that a rank receives from ranks of other experts for a pack of `tokens` of its own."""
    passes = 6 if trainer.recompute is True else 4
    rows = tokens * shape.expert_layers * shape.routed * shape.hidden
    return passes * BYTES[trainer.dtype] * rows * (1 - 1 / trainer.parallel.expert)


def _pack_s(shape: ModelShape, trainer: TrainerConfig, tokens: float, received: float, exchanged: float) -> float:
    """FSDP gathers and reduces while layers compute; tokens are exchanged while they wait."""
    parallel = trainer.parallel
    active = shape.parameters - shape.experts * (1 - shape.routed / max(shape.expert_count, 1))
    again = {False: 0, "selective": 1, True: 2}[trainer.recompute]
    computed = (6 + again) * active * tokens / FLOPS
    moved = received / (WITHIN if trainer.ranks / parallel.replicate <= MACHINE else BETWEEN)
    far = max(0.0, 1 - MACHINE / parallel.expert)
    routed = exchanged * (far / BETWEEN + (1 - far) / WITHIN)
    heads = 4 * BYTES[trainer.dtype] * tokens * shape.layers * (shape.query + shape.key_value)
    return max(computed, moved) + routed + heads * (1 - 1 / parallel.context) / WITHIN


def _cost(layout: Layout) -> tuple[float, float]:
    trainer = layout.trainer
    return {False: 0, "optimizer": 1, True: 2}[trainer.offload] + trainer.activation_offload, layout.token_s
