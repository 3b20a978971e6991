"""The data of clients: checked, and packed as the engine takes them.

Position i of `ids` predicts `targets[i]`, which may be several ids; clients shift by one themselves. All positions get
a logprob, also those that no loss weighs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.service.losses import LOSSES, ClientLoss

if TYPE_CHECKING:
    from penstock.trainer.batch import ModelLimits
    from penstock.trainer.packing import Pack


class BadRequestData(ValueError):
    """A client's request cannot be run on the model; the message names the datum and the field."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One row, L tokens."""

    ids: NDArray[np.int64]
    """[L]"""
    targets: NDArray[np.int64]
    """[L], or [L, K]: K ids in the place of each token"""
    inputs: Mapping[str, NDArray[np.float32]]
    """Tensors of the loss by name, of the shape of `targets`."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The result of one forward."""

    logprobs: Sequence[NDArray[np.float32]]
    """One array for each datum, of the shape of its targets."""
    loss: float
    """The sum over all targets."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss and its options as a client names them."""

    name: str
    options: Mapping[str, float]

    @property
    def loss(self) -> ClientLoss:
        """Raises `BadRequestData`."""
        if self.name not in LOSSES:
            raise BadRequestData(self.refusal)
        return LOSSES[self.name]

    @property
    def refusal(self) -> str:
        return (
            f"loss_fn {self.name[:100]!r}: this server has {', '.join(LOSSES)}; recipes of tinker-cookbook take the "
            "flag loss_fn=importance_sampling, loss_fn=ppo or loss_fn=cispo"
        )


def check_data(data: Sequence[Datum], call: LossCall, limits: ModelLimits) -> None:
    """Raises `BadRequestData` for what the model or the loss cannot take: an id out of range would end a GPU's work."""
    loss = call.loss
    if unknown := [name for name in call.options if name not in loss.options]:
        raise BadRequestData(f"loss_fn_config has {', '.join(unknown)}: {call.name} takes {_names(loss.options)}")
    if bad := [name for name, value in call.options.items() if not np.isfinite(value)]:
        raise BadRequestData(f"loss_fn_config.{bad[0]} is not finite")
    if not data:
        raise BadRequestData("there are no data")
    for number, datum in enumerate(data):
        problem = _problem(datum, loss, limits)
        if problem:
            raise BadRequestData(f"datum {number}: {problem}")


def _problem(datum: Datum, loss: ClientLoss, limits: ModelLimits) -> str:
    length = len(datum.ids)
    if not 0 < length <= limits.context:
        return f"{length} tokens, and the model takes 1 to {limits.context}"
    if datum.targets.ndim not in (1, 2) or len(datum.targets) != length or not datum.targets.size:
        return f"target_tokens has shape {list(datum.targets.shape)}, and model_input {length} tokens"
    for name, ids in (("model_input", datum.ids), ("target_tokens", datum.targets)):
        if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab:
            return f"{name} has an id outside of 0 to {limits.vocab - 1}"
    return _problem_of_inputs(datum, loss)


def _problem_of_inputs(datum: Datum, loss: ClientLoss) -> str:
    required = [name for name in loss.inputs if not name.endswith("?")]
    if missing := [name for name in required if name not in datum.inputs]:
        return f"loss_fn_inputs lacks {', '.join(missing)}"
    known = {name.rstrip("?") for name in loss.inputs} | loss.options.keys()
    if unknown := sorted(datum.inputs.keys() - known):
        return f"loss_fn_inputs has {', '.join(unknown)}, and this loss takes {_names(known)}"
    for name, values in datum.inputs.items():
        if values.shape != datum.targets.shape:
            return f"{name} has shape {list(values.shape)}, and target_tokens {list(datum.targets.shape)}"
        if not np.isfinite(values).all():
            return f"{name} has a number that is not finite"
    return ""


def _names(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def flat_inputs(data: Sequence[Datum], call: LossCall) -> dict[str, NDArray[np.float32]]:
    """Return the loss's inputs and options by name, [M] each, for all M targets of `data` in order."""
    loss, counts = call.loss, [datum.targets.size for datum in data]
    defaults = {"weights": 1.0} if "weights?" in loss.inputs else {}
    defaults |= {**loss.options, **call.options}
    names = {*defaults, *(name.rstrip("?") for name in loss.inputs)}
    return {
        name: np.concatenate(
            [
                datum.inputs[name].reshape(-1) if name in datum.inputs else np.full(count, defaults[name], np.float32)
                for datum, count in zip(data, counts, strict=True)
            ]
        ).astype(np.float32)
        for name in names
    }


def pack_data(data: Sequence[Datum], budget: int, *, alone: bool = False) -> list[Pack]:
    """Packs of about `budget` tokens; `token` counts the targets of all `data` in order. `alone`: a datum each."""
    from penstock.trainer.packing import split_by_budget

    parts = split_by_budget([len(datum.ids) for datum in data], 0 if alone else budget)
    firsts = np.cumsum([0, *(datum.targets.size for datum in data)])
    return [_pack([(data[index], int(firsts[index])) for index in sorted(part)]) for part in parts]


def _pack(rows: Sequence[tuple[Datum, int]]) -> Pack:
    """`rows`: each with the number of its first target."""
    import torch

    from penstock.trainer.packing import Pack

    starts = np.cumsum([0, *(len(datum.ids) for datum, _ in rows)])
    widths = [datum.targets.size // len(datum.ids) for datum, _ in rows]
    predictors = [
        start + np.repeat(np.arange(len(datum.ids)), width)
        for (datum, _), start, width in zip(rows, starts, widths, strict=False)
    ]
    numbers = [first + np.arange(datum.targets.size) for datum, first in rows]
    owner = [np.full(datum.targets.size, place) for place, (datum, _) in enumerate(rows)]
    segment, token = torch.from_numpy(np.concatenate(owner)), torch.from_numpy(np.concatenate(numbers))
    return Pack(
        ids=torch.from_numpy(np.concatenate([datum.ids for datum, _ in rows])),
        positions=torch.from_numpy(np.concatenate([np.arange(len(datum.ids)) for datum, _ in rows])),
        row_bounds=torch.from_numpy(starts.astype(np.int32)),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate([datum.targets.reshape(-1) for datum, _ in rows])),
        behaviour=torch.zeros(len(token)),
        staleness=torch.zeros(len(token), dtype=torch.long),
        mask=torch.ones(len(token), dtype=torch.bool),
        same_version=torch.zeros(len(token), dtype=torch.bool),
        episode=segment,
        segment=segment,
        token=token,
    )
