"""Models of clients over one engine: an adapter each, which lies in the engine while a request of its model runs.

Gradients add up until the model's next step. What a request changes is on the host or in the engine, and gone with the
process: `write_point` makes all of it durable at once, together with the position in the log of requests up to which it
holds. What comes after that position is run again by a trainer that restarts, and comes to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, starmap
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from penstock.common import write_atomically
from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import AdamSettings, TrainerConfig
from penstock.trainer.engines.fsdp import AdapterPlace, AdapterState, FSDPEngine
from penstock.trainer.logprobs import Outputs
from penstock.trainer.packing import Pack, RowLayout, on_device
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.service.data import BadRequestData, Datum, Forward, LossCall, check_data, flat_inputs, pack_data
from penstock.trainer.service.settings import check_settings
from penstock.trainer.state.checkpoint import NotSaved, failed_save

INDEX, STATE = "index.json", "state.safetensors"


class AdapterFolder(NamedTuple):
    """peft's folder of an adapter."""

    path: Path
    sha256: str
    """The digest of its tensors' file."""


class ClientModels:
    """All methods in the torch thread."""

    def __init__(self, model: str, config: TrainerConfig, ranks: Ranks) -> None:
        """Loads the model. Raises `BadJob` for settings that cannot serve several adapters."""
        check_settings(config)
        self._config, self._engine = config, FSDPEngine(model, config, ranks)
        adapter = self._engine.policy.adapter
        assert adapter is not None
        self._place = AdapterPlace(adapter, self._engine.optimizer, config.lora.alpha)
        self._states: dict[str, AdapterState] = {}
        """Adapters by model; the one that lies in the engine is here as it was when it was put there."""
        self._present: str | None = None
        self._files: dict[str, str] = {}
        """File of a model's state in the newest point; none for one that has changed since."""

    @property
    def limits(self) -> ModelLimits:
        return self._engine.limits

    @property
    def names(self) -> list[str]:
        return list(self._states)

    def create(self, model_id: str, rank: int, seed: int, *, attention: bool = True, mlp: bool = True) -> None:
        """Raises `BadRequestData`."""
        if not 0 < rank <= self._place.most:
            raise BadRequestData(f"rank {rank}: this server has 1 to {self._place.most} (trainer.lora.rank)")
        self._changed(model_id)
        self._states[model_id] = self._place.new(rank, seed, attention=attention, mlp=mlp)

    def forward(self, model_id: str, data: Sequence[Datum], call: LossCall, *, backward: bool) -> Forward:
        """Logprobs and loss; with `backward` the loss's gradients are added to the model's. Raises
        `BadRequestData`; nothing is changed then."""
        check_data(data, call, self.limits)
        self._enter(model_id)
        flat = {name: torch.from_numpy(values) for name, values in flat_inputs(data, call).items()}
        computed: list[tuple[Tensor, Tensor]] = []  # where they were computed: a copy would wait for the device

        def loss(pack: Pack, outputs: Outputs) -> Tensor:
            inputs = {name: on_device(values, pack.token.device)[pack.token] for name, values in flat.items()}
            computed.append((pack.token, outputs.logprobs.detach()))
            return call.loss.formula(outputs.logprobs, inputs).sum()

        packs = self._packs(data)
        if backward:
            self._changed(model_id)
            total = self._engine.accumulate(packs, loss, 1.0)
        else:
            scored = self._engine.score(packs)
            total = sum(float(loss(pack, Outputs(one, None)).double()) for pack, one in zip(packs, scored, strict=True))
        everything = torch.zeros(sum(datum.targets.size for datum in data))
        for token, logprobs in computed:
            everything[token.cpu()] = logprobs.float().cpu()
        parts = np.split(everything.numpy(), np.cumsum([datum.targets.size for datum in data])[:-1])
        shaped = [part.reshape(datum.targets.shape) for part, datum in zip(parts, data, strict=True)]
        return Forward(shaped, total)

    def step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        """One update of AdamW by the gradients that have added up; none is left. Without any nothing changes."""
        self._enter(model_id)
        self._changed(model_id)
        update = self._engine.step(adam, 0.0)
        return {"grad_norm": update.grad_norm, "learning_rate": update.lr, "update_skipped": float(update.skipped)}

    def score(self, prompts: Sequence[NDArray[np.int64]], folder: Path | None) -> list[NDArray[np.float32]]:
        """Logprobs of each prompt's tokens but the first, under the adapter of `folder`, or the base model's for None.
        Raises `BadRequestData`, `OSError`."""
        data = [Datum(ids[:-1], ids[1:], {}) for ids in prompts if len(ids) > 1]
        results: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(prompts)
        if not data:
            return results
        check_data(data, LossCall("cross_entropy", {}), self.limits)
        self._leave()
        adapter = self._engine.policy.adapter
        assert adapter is not None
        if folder is not None:
            self._place.put(_without_training(_state_in(folder)))
        with adapter.off() if folder is None else nullcontext():
            packs = self._packs(data)
            scored = self._engine.score(packs)
        everything = torch.zeros(sum(len(datum.targets) for datum in data))
        for pack, logprobs in zip(packs, scored, strict=True):
            everything[pack.token] = logprobs
        parts = iter(np.split(everything.numpy(), np.cumsum([len(datum.targets) for datum in data])[:-1]))
        return [next(parts) if len(ids) > 1 else none for ids, none in zip(prompts, results, strict=True)]

    def write_served(self, folder: Path, target: Path) -> AdapterFolder:
        """Write a saved adapter into a new folder in `target` as rollout servers read it: under the names of the
        model's files. Not in the torch thread. Raises `BadRequestData` for damaged files, `OSError`."""
        adapter = self._engine.policy.adapter
        assert adapter is not None
        with _damage_named(folder):
            weights = load_file(folder / "adapter_model.safetensors")
        settings = (folder / "adapter_config.json").read_bytes()
        content = save(dict(chain.from_iterable(starmap(adapter.published, weights.items()))))
        target.mkdir(exist_ok=True)
        place = Path(mkdtemp(dir=target))
        (place / "adapter_config.json").write_bytes(settings)
        (place / "adapter_model.safetensors").write_bytes(content)
        return AdapterFolder(place, hashlib.sha256(content).hexdigest())

    # checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> int:
        """Write a folder that `load` and peft read; returns its bytes. Raises `NotSaved`, `OSError`."""
        state, settings = self._state(model_id), self._engine.adapter_settings
        assert settings is not None
        is_new = not folder.exists()
        with _failure_named(folder, removes=is_new):
            state.write_peft(folder, settings, self._config.lora.alpha)
            (
                AdapterState(state.rank, state.weights, state.moments, state.steps)
                if with_optimizer
                else _without_training(state)
            ).write(folder / STATE)
        return sum(file.stat().st_size for file in folder.iterdir())

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """The model's adapter is that of `folder`, with fresh moments unless `with_optimizer`; its gradients are
        dropped. Raises `BadRequestData`, `OSError`."""
        state = _state_in(folder)
        known = self._states.get(model_id)
        if state.rank > self._place.most or (known is not None and known.rank != state.rank):
            rank = known.rank if known is not None else self._place.most
            raise BadRequestData(f"the checkpoint has rank {state.rank}, and the model {rank}")
        if self._present == model_id:
            self._present = None
        self._changed(model_id)
        self._states[model_id] = state if with_optimizer else _without_training(state)

    def remove(self, model_id: str) -> None:
        if self._present == model_id:
            self._present = None
        self._states.pop(model_id, None)
        self._files.pop(model_id, None)

    def drop_gradients(self, model_id: str) -> None:
        """A request has failed in the middle of them."""
        if model_id in self._states:
            self._leave()
            self._changed(model_id)
            self._states[model_id].gradients.clear()

    def write_point(self, folder: Path, position: int, note: Mapping[str, Any] | None = None) -> None:
        """Make everything durable, as it is after `position` requests of the log. `note` is JSON that is written with
        it. Raises `NotSaved`, `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        with _failure_named(folder, removes=False):  # it holds the point before
            for model_id in self._states.keys() - self._files.keys():
                name = f"{re.sub('[^A-Za-z0-9_-]', '_', model_id)}-{position}.safetensors"
                self._state(model_id).write(folder / name)
                self._files[model_id] = name
            index = {"position": position, "models": self._files, "note": note}
            write_atomically(folder / INDEX, json.dumps(index), durable=True)
        for file in folder.glob("*.safetensors"):
            if file.name not in self._files.values():
                file.unlink()

    def read_point(self, folder: Path) -> tuple[int, Mapping[str, Any] | None]:
        """Restore the newest point; returns its position and note, 0 and None where there is none."""
        if not (folder / INDEX).exists():
            return 0, None
        index: Mapping[str, Any] = json.loads((folder / INDEX).read_text())
        self._present, self._files = None, dict(index["models"])
        self._states = {model_id: AdapterState.read(folder / name) for model_id, name in self._files.items()}
        return int(index["position"]), index["note"]

    # the engine ----------------------------------------------------------------------------------------------------
    def _packs(self, data: Sequence[Datum]) -> list[Pack]:
        alone = self._engine.row_layout is not RowLayout.PACKED
        return pack_data(data, self._config.micro_batch_tokens, alone=alone)

    def _state(self, model_id: str) -> AdapterState:
        if self._present == model_id:
            self._states[model_id] = self._place.take(self._states[model_id].rank)
        return self._states[model_id]

    def _enter(self, model_id: str) -> None:
        if model_id not in self._states:
            raise BadRequestData(f"model {model_id} is not here any more")
        if self._present != model_id:
            self._leave()
            self._place.put(self._states[model_id])
            self._present = model_id

    def _leave(self) -> None:
        if self._present is not None:
            self._state(self._present)
            self._present = None

    def _changed(self, model_id: str) -> None:
        self._files.pop(model_id, None)


@contextmanager
def _failure_named(folder: Path, *, removes: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        failure = failed_save(folder, None, error, removes=removes, what="state")
        if isinstance(failure, NotSaved):
            raise failure from error
        raise


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Raises `BadRequestData` for a damaged file: that request fails, and not each trainer that runs it again."""
    try:
        yield
    except SafetensorError as error:
        raise BadRequestData(f"the files of {folder.name} are damaged: {error}") from error


def _state_in(folder: Path) -> AdapterState:
    """Raises `BadRequestData` for a damaged file, `OSError`."""
    with _damage_named(folder):
        return AdapterState.read(folder / STATE)


def _without_training(state: AdapterState) -> AdapterState:
    return AdapterState(state.rank, state.weights)
