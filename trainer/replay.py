"""`penstock train replay`: a dumped minibatch computed again, and where its first value that is not finite comes from.

In the order of the computation: a weight ─► an input ─► a module's output ─► a token's logprob ─► a token's loss ─► a
gradient. The first one found is the cause, what follows is its consequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.trainer.bad_batch import ADAPTER, Dump, RankShare, read_dump
from penstock.trainer.engines.fsdp.models import load_policy
from penstock.trainer.engines.fsdp.sharded import TrainableModule
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective
from penstock.trainer.packing import Pack
from penstock.trainer.ranks.distributed import Ranks

TOLERANCE = 1e-4
"""Relative: one process adds gradients in another order than several ranks did."""
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Replayed:
    dump: Dump
    loss: float
    grad_norm: float
    causes: Sequence[str]
    """What is not finite, the first one first; empty where everything is finite."""

    @property
    def reproduced(self) -> bool:
        return same(self.loss, self.dump.loss) and same(self.grad_norm, self.dump.grad_norm)


def replay_dump(folder: Path) -> Replayed:
    """In one process, whatever number of ranks wrote the dump. Raises `BadDump`."""
    dump = read_dump(folder)
    ranks = Ranks.open(TIMEOUT_S)
    try:
        return _replay(dump, ranks)
    finally:
        ranks.close()


def same(given: float, recorded: float) -> bool:
    """Equal up to rounding; NaN and the infinities equal themselves."""
    if not math.isfinite(recorded):
        return str(given) == str(recorded)
    return math.isclose(given, recorded, rel_tol=TOLERANCE, abs_tol=1e-9)


def _replay(dump: Dump, ranks: Ranks) -> Replayed:
    config = dump.config.anywhere()
    policy = load_policy(str(dump.model), dump.temperature, config)
    if policy.adapter is not None:
        policy.adapter.load(dump.model / ADAPTER)
    learning = TrainableModule(policy, config, ranks)
    finder = Finder()
    finder.look("weight", learning.module.named_parameters())
    for share in dump.shares:
        finder.look_at_inputs(share)
    packs = [pack for share in dump.shares for pack in share.packs]
    with finder.watching(learning.module):
        loss = learning.accumulate(packs, _Losses(dump, finder), dump.divisor)
    gradients = [(name, one.grad) for name, one in learning.module.named_parameters() if one.grad is not None]
    finder.look("gradient of", reversed(gradients))
    update = learning.step(0.0, loss)
    return Replayed(dump, update.loss, update.grad_norm, finder.causes)


class _Losses:
    """The loss of each pack in its turn, under the targets of the rank that had it."""

    def __init__(self, dump: Dump, finder: Finder) -> None:
        self._finder = finder
        self._turns = iter([share for share in dump.shares for _ in share.packs])
        self._seen = _Seen()
        self._objectives = {id(share): Objective(dump.config, share.targets, self._seen) for share in dump.shares}  # type: ignore[arg-type]

    def __call__(self, pack: Pack, outputs: Outputs) -> Tensor:
        share = next(self._turns)
        every = torch.arange(len(outputs.logprobs))
        self._finder.look_at_tokens("logprob", outputs.logprobs.detach().cpu(), every, pack, share)
        self._seen.values.clear()
        total = self._objectives[id(share)](pack, outputs)
        kept = every[pack.mask.cpu()]
        for name, values in self._seen.values.items():
            if len(values) == len(kept):
                self._finder.look_at_tokens(name.removeprefix("policy/"), torch.from_numpy(values), kept, pack, share)
        return total


@dataclass
class _Seen:
    """Takes the place of a `MetricAccumulator`: values per trained token, by name."""

    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, values: ArrayLike) -> None:
        self.values[name] = np.atleast_1d(np.asarray(values, dtype=np.float64))


class Finder:
    """Collects what is not finite, in the order in which it is shown."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def look(self, what: str, named: Any) -> None:
        """The first of these tensors that is not finite, and where."""
        for name, tensor in named:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            place = first_bad(whole)
            if place is not None:
                self.causes.append(f"{what} {name}, {place}")
                return

    def look_at_inputs(self, share: RankShare) -> None:
        for pack in share.packs:
            given = {"behaviour": pack.behaviour, "proximal": pack.proximal, "reference": pack.reference}
            for name, tensor in given.items():
                if tensor is not None:
                    self.look_at_tokens(f"input {name}", tensor, torch.arange(len(tensor)), pack, share)
        self.look("input", [("advantages", share.targets.advantages), ("weights", share.targets.episode_weights)])

    def look_at_tokens(self, what: str, values: Tensor, token: Tensor, pack: Pack, share: RankShare) -> None:
        """values [M] of the pack's sampled tokens `token` [M]"""
        bad = (~torch.isfinite(values)).nonzero().flatten()
        if len(bad):
            at = int(token[bad[0]])
            self.causes.append(f"{what} {float(values[bad[0]])} of {token_name(pack, at, share)}")

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Reports the first module whose output is not finite: modules without parts, in the order of their calls."""
        found: list[str] = []

        def hook(name: str, output: Any) -> None:
            place = next((p for p in map(first_bad, _tensors(output)) if p is not None), None)
            if place is not None and not found:
                self.causes.append(f"output of {name}, {place}")
                found.append(name)

        handles = [
            part.register_forward_hook(lambda _, inputs, output, name=name: hook(name, output))
            for name, part in module.named_modules()
            if not list(part.children())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def first_bad(tensor: Tensor) -> str | None:
    """``element [0, 17, 3] is nan``"""
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        return None
    bad = (~torch.isfinite(tensor)).nonzero()
    if not len(bad):
        return None
    place = bad[0].tolist()
    return f"element {place} is {float(tensor[tuple(place)])}"


def token_name(pack: Pack, token: int, share: RankShare) -> str:
    """`token` indexes the pack's sampled tokens."""
    place = int(pack.positions[pack.predictors[token]]) + 1
    episode = share.episodes[int(pack.episode[token])]
    return f"token {place} of its segment (id {int(pack.targets[token])}), episode {episode}"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
