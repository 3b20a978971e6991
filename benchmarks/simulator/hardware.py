"""Datasheets and what follows from them: seconds per decoded token, per gradient exchange, per weight transfer.

Every figure is the vendor's or the model card's. Real engines are slower by a factor; `published.py` finds it for each
case from the synchronous run, so only the *shape* that these formulas give decides a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One GPU and its share of the node."""

    flops: float
    """bf16, dense, per second."""
    memory_bytes_per_s: float
    network_bytes_per_s: float
    """To other nodes. HGX boards have one 400 Gb/s port for two GPUs or one for each; half a port is assumed."""
    host_bytes_per_s: float
    """To CPU memory and back, as offloading does it; `published.host_bytes_per_s` derives it."""


@dataclass(frozen=True)
class Model:
    parameters: float
    active: float
    """Parameters that one token uses; less than all in a mixture of experts."""
    kv_bytes_per_token: float
    """2 · layers · kv heads · head size · 2 bytes."""

    @property
    def bytes(self) -> float:
        return 2 * self.parameters


HOST_BYTES_PER_S = 4.2e9
MACHINES = {
    "H20": Machine(148e12, 4.0e12, 25e9, HOST_BYTES_PER_S),
    "H100": Machine(989e12, 3.35e12, 50e9, HOST_BYTES_PER_S),
    "H800": Machine(989e12, 3.35e12, 50e9, HOST_BYTES_PER_S),
}
MODELS = {
    "Qwen2.5-7B": Model(7.62e9, 7.62e9, 2 * 28 * 4 * 128 * 2),
    "Qwen2.5-32B": Model(32.8e9, 32.8e9, 2 * 64 * 8 * 128 * 2),
    "Qwen3-30B-A3B": Model(30.5e9, 3.3e9, 2 * 48 * 4 * 128 * 2),
    "Qwen3-235B-A22B": Model(235e9, 22e9, 2 * 94 * 4 * 128 * 2),
}


def token_s(model: Model, machine: Machine, gpus: int) -> float:
    """Decoding one sequence alone: every active weight is read once per token."""
    return 2 * model.active / (gpus * machine.memory_bytes_per_s)


def token_s_per_sequence(model: Model, machine: Machine, gpus: int, context: float) -> float:
    """Returns the seconds per token that one more sequence adds: 2 FLOPs per active parameter, and reading its KV."""
    compute_s = 2 * model.active / (gpus * machine.flops)
    return compute_s + model.kv_bytes_per_token * context / (gpus * machine.memory_bytes_per_s)


def gradient_exchange_s(model: Model, machine: Machine, shards: int, ranks_gpus: int) -> float:
    """One update's all-reduce of float32 gradients over the copies of the model, of which `shards` GPUs hold one.

    A ring moves 2·(n − 1)/n of each GPU's part, n = copies; more GPUs do not shorten it.
    """
    copies = max(1, ranks_gpus // shards)
    return 2 * (copies - 1) / copies * 4 * model.parameters / shards / machine.network_bytes_per_s


def offloaded_bytes(model: Model, shards: int) -> float:
    """Float32 weights and both Adam moments of one GPU, there and back."""
    return 2 * 12 * model.parameters / shards


def offload_s(model: Model, machine: Machine, shards: int) -> float:
    """Once per step."""
    return offloaded_bytes(model, shards) / machine.host_bytes_per_s
