"""Weights cross from a GPU to the host in the dtype that is published: fake CUDA tensors, every operation recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.weight_sync import host_copy, spread_shards
from penstock.weight_sync.broadcast import share_changes

pytestmark = pytest.mark.torch
VALUES = 3 << 20


class Crossings(TorchDispatchMode):
    """Dtypes and values of what an operation brings from one device to another."""

    def __init__(self, steps: list[str] | None = None) -> None:
        """`steps`: notes the copies that the host does not wait for."""
        super().__init__()
        self._steps = [] if steps is None else steps
        self.crossed: list[tuple[Any, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
            for tensor in tree_leaves(source):
                if isinstance(tensor, torch.Tensor) and tensor.device != result.device:
                    self.crossed.append((tensor.dtype, result.dtype, result.numel()))
                    if func is torch.ops.aten.copy_.default and args[2:] == (True,):
                        self._steps.append("copies")
        return result


def replace_share(weights: Any, *, base: int | None) -> None:
    with unset_fake_temporarily():
        changes = share_changes.ShareChanges(base, [VALUES])
    changes.replace(0, torch.empty(VALUES, dtype=torch.bfloat16), weights)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the pieces of a share, in order; an event must be recorded after the last copy."""
    done = list[str]()

    class Event:
        def record(self) -> None:
            assert done[-1] == "copies"

        def synchronize(self) -> None:
            done.append("waits")

    def compare(marks: Any, old: Any, new: Any) -> None:
        """Fake tensors have no values that could be compared."""
        done.append("compares")
        old.copy_(new)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(share_changes, "_compare", compare)
    monkeypatch.setattr(share_changes, "MOVED_VALUES", 1 << 20)
    return done


@pytest.mark.parametrize(
    "publish",
    [
        lambda weights: host_copy(weights, torch.bfloat16),
        lambda weights: list(spread_shards([("w", weights)], torch.bfloat16, 0, 1)),
        lambda weights: replace_share(weights, base=None),
        lambda weights: replace_share(weights, base=3),
    ],
    ids=["gathered", "spread", "first share", "next share"],
)
def test_float32_weights_on_a_gpu_reach_the_host_as_bfloat16(steps: list[str], publish: Callable[[Any], Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Crossings(steps) as crossings:
        publish(torch.empty(VALUES, device="cuda", dtype=torch.float32))
    assert {(source, target) for source, target, _ in crossings.crossed} == {(torch.bfloat16, torch.bfloat16)}
    assert sum(values for _, _, values in crossings.crossed) == VALUES


def test_share_is_brought_to_the_host_while_the_piece_before_is_compared(steps: list[str]) -> None:
    """And none is read before it arrived: one wait for each."""
    with FakeTensorMode(allow_non_fake_inputs=True), Crossings(steps):
        replace_share(torch.empty(VALUES, device="cuda", dtype=torch.float32), base=3)
    first, between, last = ["copies"], ["copies", "waits", "compares"], ["waits", "compares"]
    assert steps == [*first, *between, *between, *last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copy_of_a_cpu_tensor_has_memory_of_its_own(dtype: Any) -> None:
    tensor = torch.arange(4).to(dtype)
    copied = host_copy(tensor, torch.bfloat16)
    tensor += 1
    assert copied.tolist() == [0, 1, 2, 3]
    assert copied.dtype == (torch.int64 if dtype == torch.int64 else torch.bfloat16)
