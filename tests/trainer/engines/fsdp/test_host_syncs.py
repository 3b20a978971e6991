"""A packed forward and backward waits for the device as often however many layers the model has.

What waits on a GPU is counted by its operations, on the host: scalars, lists and sizes that are read from tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_support import make_segment, one_pack

from penstock.trainer import ModelLimits, Pack, Ranks, TrainerConfig, make_row, pack_rows
from penstock.trainer.engines.fsdp import FSDPEngine, Policy
from penstock.trainer.engines.fsdp.attention import VisibleKeys, attend_by_kernel
from penstock.trainer.engines.fsdp.mixers import mix_rows
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective, Targets
from penstock.trainer.losses import LOSSES
from penstock.trainer.metrics import MetricAccumulator

pytestmark = pytest.mark.torch
READS = ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__")
"""Methods of a tensor that wait for its device."""
WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.unique_consecutive)


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.moved = 0
        """Copies between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in WAITING
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self.moved += len({one.device for one in (*args, result) if isinstance(one, torch.Tensor)}) > 1
        return result


@contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """(reads by Python, operations that wait) so far"""
    with _Reads() as reads, _Operations() as operations:
        yield lambda: (reads.count, operations.count)


def shared_pack() -> Pack:
    """Three rows, two of which share their prompt."""
    rng, limits = np.random.default_rng(0), ModelLimits(context=64, vocab=64)
    first, other = make_segment(rng, 0, prompt=12, response=9), make_segment(rng, 0, prompt=5, response=14)
    second = replace(make_segment(rng, 0, prompt=12, response=20), prompt_ids=first.prompt_ids)
    rows = [make_row(n, one, "", step=0, bound=0, model=limits) for n, one in enumerate((first, second, other))]
    (pack,) = pack_rows(rows, 1000, share=True)
    assert pack.forks is not None
    return pack


def test_waits_do_not_grow_with_layers(tmp_path: Path, ranks: Ranks) -> None:
    """Also where layers are computed again in the backward."""
    counts = []
    for layers in (2, 4):
        model = save_tiny_model(tmp_path / str(layers), num_hidden_layers=layers)
        policy = FSDPEngine(model, TrainerConfig(recompute=True), ranks).policy
        assert "row by row" not in str(policy.rows)
        assert not policy.unshared_because, "rows are packed, and attention is ours"
        _forward_and_backward(policy)  # torch looks up once what it does for a kind of tensor
        with counted() as so_far:
            _forward_and_backward(policy)
            counts.append(so_far())
    assert counts[0] == counts[1]


def _forward_and_backward(policy: Policy) -> None:
    for pack in (one_pack(60, vocab=64), shared_pack()):
        policy(pack).logprobs.sum().backward()


def test_layers_with_a_state_read_no_lengths_either() -> None:
    """Called row by row, by the lengths that attention is given; the kernels' own code is not ours."""
    module = type("BambaMixer", (torch.nn.Module,), {"forward": lambda self, hidden_states: hidden_states.cumsum(1)})()
    mix_rows(module, row_by_row=True)
    pack = one_pack(60, vocab=64)
    seen = VisibleKeys.of(pack.row_bounds, pack.run_lengths)
    with counted() as so_far:
        found = module(torch.ones(1, 60, 3), cu_seq_lens_q=pack.row_bounds, seen=seen)
        assert so_far() == (0, 0)
    assert found[0, :, 0].tolist() == [*range(1, 31), *range(1, 31)]


def test_lengths_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernel is given the longest run and the most keys, and nothing is read for them."""
    given: list[tuple[int, int]] = []

    def kernel(query: Any, key: Any, value: Any, queries: Any, keys: Any, *longest: int, **_: Any) -> Any:
        assert queries.dtype == keys.dtype == torch.int32
        given.append(longest)
        return query

    monkeypatch.setattr("penstock.trainer.engines.fsdp.attention.KERNEL", kernel)
    pack = shared_pack()
    assert pack.run_lengths.tolist() == [21, 20, 19]
    seen = VisibleKeys.of(pack.row_bounds, pack.run_lengths, pack.forks)
    query = torch.zeros(1, 4, len(pack.ids), 8)
    with counted() as so_far:
        for _ in range(3):
            attend_by_kernel(query, seen.of_runs(query), seen.of_runs(query), seen, scaling=None, window=None)
        assert so_far() == (0, 0)
    assert given == [(21, 32)] * 3
    assert (seen.query_lengths, seen.key_lengths) == ((21, 20, 19), (21, 32, 19))


def test_lengths_stay_on_the_host() -> None:
    """A pack on its way to a device keeps what is read there where it can be read without waiting."""
    moved = shared_pack().to(torch.device("meta"))
    assert moved.row_bounds.is_meta
    assert moved.run_lengths.tolist() == [21, 20, 19]
    assert moved.forks.tolist() == [-1, 11, -1]


OBJECTIVES: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss} for loss in LOSSES.names()},
    **{level: {"correction_options": {"level": level}} for level in ("token", "sequence", "geometric")},
    "teacher": {"distill": {"in_loss": 0.5}, "kl": {"in_loss": 0.1}, "entropy_bonus": 0.1},
    "interpolated": {"proximal": "interpolated", "correction": "rejection"},
}


@pytest.mark.parametrize("settings", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_loss_waits_for_no_device(settings: dict[str, Any]) -> None:
    """A tensor on meta has no values: what reads one, or asks how many are true, fails. What a loss takes of the step
    is copied to the device once."""
    pack = one_pack(60, vocab=64)
    count, meta = len(pack.targets), torch.device("meta")
    of_tokens = torch.zeros(count)
    pack = replace(pack, reference=of_tokens, teacher=of_tokens, proximal=of_tokens)
    pack = replace(pack, top_ids=torch.zeros(count, 1, dtype=torch.int32), top_logprobs=torch.zeros(count, 1)).to(meta)
    targets = Targets(of_tokens, torch.ones(2).double(), of_tokens > 0, torch.ones(2, 4))
    objective = Objective(TrainerConfig(**settings), targets, MetricAccumulator())
    logprobs, entropy, coarse = (torch.zeros(count, *k, device=meta, requires_grad=True) for k in ((), (), (2,)))
    moved = []
    for _ in range(2):
        with _Operations() as operations:
            objective(pack, Outputs(logprobs, entropy, coarse)).backward()
        moved.append(operations.moved)
        assert operations.count == 0
    assert moved == [4, 0]


def test_what_was_measured_on_a_device_is_read_in_the_end(ranks: Ranks) -> None:
    tally = MetricAccumulator()
    with counted() as so_far:
        tally.add_tensor("x", torch.tensor([1.0, 5.0], requires_grad=True))
        tally.add_tensor("x", torch.tensor([True, False, True]), torch.tensor([True, True, False]))
        assert so_far() == (0, 0)
    assert tally.reduce(ranks).mean("x") == 7 / 4
