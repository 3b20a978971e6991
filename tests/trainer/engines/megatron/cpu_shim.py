"""Lets megatron-core 0.16 run on CPU tensors and gloo, for tests alone. Import it before anything of megatron.

Nothing numerical is replaced: only the answers to "which device", "which random state" and "which type name", streams
and events, and two places that go wrong without Transformer Engine. `torch.cuda.is_available()` stays False, so whoever
asks takes the way for CPUs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """A CPU has one order of execution: waiting and recording have nothing to do."""

    def __init__(self, *args: Any, **settings: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()


class Event(Stream):
    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class OnTheCpu(TorchFunctionMode):
    """`device="cuda"` of factory functions means the CPU. It holds in the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


def _answer_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **settings: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **settings: 0)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *args: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **settings: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **settings: self  # type: ignore[method-assign]


def _name_types_as_on_gpus() -> None:
    """megatron's optimizer compares `tensor.type()` with the names of CUDA types."""
    original = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **settings: Any) -> Any:
        found = original(self, *args, **settings)
        asked_by = sys._getframe(1).f_code.co_filename
        if not args and not settings and isinstance(found, str) and "megatron" in asked_by and "/core/" in asked_by:
            return found.replace("torch.", "torch.cuda.")
        return found

    torch.Tensor.type = type_of  # type: ignore[method-assign]


def _repair_experts_without_transformer_engine() -> None:
    """A name that is never bound, and split sizes that stay tensors unless they were on a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _use_cpu_random_state() -> None:
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


def _enter_in_every_torch_thread() -> None:
    """The trainer's torch thread begins with `torch.set_num_threads`, which is a setting of the thread too."""
    original = torch.set_num_threads

    def set_num_threads(threads: int) -> None:
        original(threads)
        OnTheCpu().__enter__()

    torch.set_num_threads = set_num_threads


@contextlib.contextmanager
def sequence_parallelism() -> Iterator[None]:
    """As with Transformer Engine's layers: torch's norm is taken too, its weight marked, so that megatron adds up its
    gradient over the tensor ranks, of which each has its part of the tokens."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def marked_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **rest: Any) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    original: Any = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = marked_norm
    try:
        with mock.patch.dict("penstock.trainer.engines.megatron.bridge.PLAIN", sequence_parallel=True):
            yield
    finally:
        WrappedTorchNorm.__new__ = original


def install() -> None:
    _answer_for_cuda()
    OnTheCpu().__enter__()
    _enter_in_every_torch_thread()
    _name_types_as_on_gpus()
    _use_cpu_random_state()
    _repair_experts_without_transformer_engine()
    mock.patch("penstock.trainer.engines.megatron.settings.require_gpu", return_value=None).start()


install()
