"""A minibatch whose loss or gradient was not finite, kept with the weights that it was trained on.

    bad_batches/step_000012_0/   (step, minibatch)
        about.json               written last: loss, gradient norm, settings, episodes by rank, checksums of the files
        rank_00.safetensors      what rank 0 trained: `I.FIELD` of pack I, `targets.FIELD`
        episodes_00.jsonl        its episodes for people, as in trajectories/
        model/                   the policy's weights before the update, a Hugging Face folder; under LoRA the weights
                                 beside its matrices, and these in model/adapter

Nothing is pickled. `penstock train replay FOLDER` computes it again, see `replay`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.common import fsync_path, fsync_tree
from penstock.trainer.batch import StepBatch
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engine import Engine, Update
from penstock.trainer.export import save_final_model
from penstock.trainer.loss import Targets
from penstock.trainer.packing import Pack
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.state.checkpoint import fingerprint, fingerprints
from penstock.trainer.state.recorder import readable_trajectory

ABOUT = "about.json"
ADAPTER = "adapter"
FORMAT = 1
T = TypeVar("T")
logger = logging.getLogger(__name__)


class BadDump(ValueError):
    """The folder is no dump, or not as it was written; the message names the file."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank trained of a minibatch."""

    packs: Sequence[Pack]
    targets: Targets
    episodes: Sequence[str]
    """Ids, by `Pack.episode`"""


class MinibatchPlace(NamedTuple):
    """Where in its step a minibatch stands, and what its sum of losses is divided by."""

    minibatch: int
    divisor: float


@dataclass(frozen=True, slots=True)
class Dump:
    """A minibatch of all ranks, with what came of it."""

    step: int
    minibatch: int
    loss: float
    grad_norm: float
    divisor: float
    temperature: float
    config: TrainerConfig
    shares: Sequence[RankShare]
    model: Path


class BadBatches:
    """The folder of a run, written by all ranks together. `keep` dumps at most: each holds all weights."""

    def __init__(self, folder: Path, keep: int, model: str, engine: Engine, ranks: Ranks) -> None:
        """`model`: whose tokenizer goes into the dump."""
        self._folder = folder
        self._keep = keep
        self._model = model
        self._engine = engine
        self._ranks = ranks

    def write(
        self, config: TrainerConfig, batch: StepBatch, share: RankShare, place: MinibatchPlace, update: Update
    ) -> Path | None:
        """A collective. None where there are enough, or the disk refused, which is said: a dump that fails must not end
        the run that it is about."""
        ranks = self._ranks
        final = self._folder / f"step_{batch.step:06d}_{place.minibatch}"
        temporary = final.with_suffix(".tmp")
        if not ranks.from_rank0(self._begin(temporary) if ranks.is_rank0 else None):
            return None
        problems = ranks.gather(self._write_share(temporary, batch, share))
        episodes = ranks.data.gather(list(share.episodes))
        if ranks.is_rank0 and not any(problems):
            about = self._about(config, batch, place, update) | {"episodes": episodes}
            problems.append(_attempt(lambda: _seal(temporary, final, about)))
        problem = ranks.from_rank0(next((found for found in problems if found), ""))
        if problem and ranks.is_rank0:
            logger.error("the batch of step %d could not be kept for a replay: %s", batch.step, problem)
            shutil.rmtree(temporary, ignore_errors=True)
        return None if problem else final

    def _begin(self, temporary: Path) -> bool:
        """On rank 0: is there room for another one? What a killed trainer left half-written goes."""
        for leftover in self._folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        if len(list(self._folder.glob("step_*"))) >= self._keep:
            return False
        problem = _attempt(lambda: temporary.mkdir(parents=True, mode=0o700))
        if problem:
            logger.error("no batch can be kept for a replay: %s", problem)
        return not problem

    def _write_share(self, folder: Path, batch: StepBatch, share: RankShare) -> str:
        """The weights are gathered by all ranks before any file is written, so a full disk stops no collective."""

        def write() -> None:
            number = self._ranks.data.rank
            save_file(_tensors(share), folder / f"rank_{number:02d}.safetensors")
            lines = [json.dumps(readable_trajectory(one, None, None)) for one in batch.trajectories]
            (folder / f"episodes_{number:02d}.jsonl").write_text("".join(f"{line}\n" for line in lines))

        problem = self._write_model(folder / "model")
        # Ranks that share a copy of the model hold the same rows.
        return problem or (_attempt(write) if self._ranks.is_replica_leader else "")

    def _write_model(self, folder: Path) -> str:
        """What went wrong. The adapter is gathered also where rank 0 could not write: the other ranks are there."""
        engine, ranks = self._engine, self._ranks
        problem = _attempt(lambda: save_final_model(engine, ranks, self._model, folder, with_adapter=False))
        if engine.adapter_settings is None:
            return problem
        return _attempt(lambda: engine.save_adapter(folder / ADAPTER)) or problem

    def _about(self, config: TrainerConfig, batch: StepBatch, place: MinibatchPlace, update: Update) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": batch.step,
            "minibatch": place.minibatch,
            "divisor": place.divisor,
            "loss": str(update.loss),  # JSON has no NaN
            "grad_norm": str(update.grad_norm),
            "temperature": self._engine.temperature,
            "config": config.model_dump(mode="json"),
        }


def read_dump(folder: Path) -> Dump:
    """Raises `BadDump`."""
    about = _read_about(folder)
    shares = [
        _to_share(load_file(folder / f"rank_{rank:02d}.safetensors"), episodes)
        for rank, episodes in enumerate(about["episodes"])
    ]
    return Dump(
        step=about["step"],
        minibatch=about["minibatch"],
        loss=float(about["loss"]),
        grad_norm=float(about["grad_norm"]),
        divisor=about["divisor"],
        temperature=about["temperature"],
        config=TrainerConfig.model_validate(about["config"]),
        shares=shares,
        model=folder / "model",
    )


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        for name, expected in about["files"].items():
            if fingerprint(folder / name) != expected:
                raise BadDump(f"{folder / name} differs from its checksum")
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise BadDump(f"{folder} is no whole dump of a batch: {type(error).__name__}: {error}") from error
    if about["format"] != FORMAT:
        raise BadDump(f"{folder} has format {about['format']}; this version reads {FORMAT}")
    return about


def _seal(temporary: Path, final: Path, about: Mapping[str, Any]) -> None:
    (temporary / ABOUT).write_text(json.dumps({**about, "files": fingerprints(temporary)}, indent=1))
    fsync_tree(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    fsync_path(final.parent)


def _attempt(work: Any) -> str:
    """What went wrong with the disk, or nothing."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _tensors(share: RankShare) -> dict[str, Tensor]:
    named = {f"{number}.": pack for number, pack in enumerate(share.packs)} | {"targets.": share.targets}
    found = {f"{prefix}{one.name}": getattr(part, one.name) for prefix, part in named.items() for one in fields(part)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items() if tensor is not None}


def _to_share(tensors: Mapping[str, Tensor], episodes: Sequence[str]) -> RankShare:
    numbers = sorted({int(name.split(".")[0]) for name in tensors if not name.startswith("targets.")})
    packs = [_part(Pack, f"{number}.", tensors) for number in numbers]
    return RankShare(packs, _part(Targets, "targets.", tensors), episodes)


def _part(kind: type[T], prefix: str, tensors: Mapping[str, Tensor]) -> T:
    return kind(**{name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)})
