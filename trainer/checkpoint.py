"""Checkpoints: written in the background, whole or not at all, checked before they are used.

    save(step) ──► copy the state (torch thread) ──► step_00000010.tmp/  DCP shards of all ranks
               ──► rank 0: checksums into ``complete``, fsync, rename to step_00000010/, delete the oldest

A folder without ``complete``, or with a file that differs from it, is not a checkpoint. The folder is readable by its
owner only: DCP's metadata is a pickle.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from penstock.trainer.durable import fingerprint, fingerprints, sync, sync_tree
from penstock.trainer.ranks import Ranks
from penstock.trainer.recent import Groups
from penstock.transfer_queue import DataCursor

if TYPE_CHECKING:
    from penstock.trainer.engine import FSDPEngine

COMPLETE = "complete"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint."""

    path: Path
    step: int
    """Optimizer steps in it: training goes on with this one."""
    data_cursor: DataCursor
    """Place in the data stream after the last submitted task."""
    ranks: int
    """How many wrote it; another number can read it."""
    batches: Mapping[int, Groups] = field(default_factory=dict)
    """Groups of the latest steps in it, from before the last commit on: for a queue that has forgotten them."""


class CheckpointStore:
    """The folder ``checkpoints/`` of a run. Only rank 0 seals, finds and deletes; the shards come from all ranks."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self.damaged = 0
        """Checkpoints that were set aside, in all lives of the run."""

    def open(self) -> None:
        """Make the folder, private to its owner; what a killed trainer left half-written goes."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self.folder.glob("*.tmp"):
            logger.warning("checkpoint %s was never finished: its writer died; it is removed", leftover)
            shutil.rmtree(leftover)
        self.damaged = len(list(self.folder.glob("*.damaged")))

    def unfinished(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.tmp"

    def seal(self, step: int, data_cursor: DataCursor, ranks: int, batches: Mapping[int, Groups]) -> Found:
        """Make the unfinished folder a checkpoint. When this returns it survives a power cut."""
        temporary, final = self.unfinished(step), self.unfinished(step).with_suffix("")
        found = Found(final, step, data_cursor, ranks, batches)
        files = fingerprints(temporary)
        (temporary / COMPLETE).write_text(json.dumps(_marker(found, files), indent=1))
        sync_tree(temporary)
        if final.exists():  # of an earlier life of the run that went back behind this step
            shutil.rmtree(final)
        temporary.rename(final)
        sync(self.folder)
        self._delete_old()
        return found

    def newest(self) -> Found | None:
        """The newest whole checkpoint. A damaged one is said in the log and set aside under another name, so that it
        neither counts among those kept nor stands in the way of a new one."""
        for path in self._newest_first():
            try:
                return read_marker(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.error("checkpoint %s is damaged (%s); taking the one before", path, error)
                self._set_aside(path)
        return None

    def _newest_first(self) -> list[Path]:
        return sorted((p for p in self.folder.glob("step_*") if not p.suffix), reverse=True)

    def _set_aside(self, path: Path) -> None:
        aside = path.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        self.damaged = len(list(self.folder.glob("*.damaged")))

    def _delete_old(self) -> None:
        for path in self._newest_first()[self._keep :]:
            shutil.rmtree(path)


def read_marker(path: Path) -> Found:
    """Check every file of a checkpoint, this one first. Raises `OSError` or `ValueError` naming what is missing or
    different."""
    marker = json.loads((path / COMPLETE).read_text())
    if _digest({key: value for key, value in marker.items() if key != "xxh3"}) != marker["xxh3"]:
        raise ValueError(f"{COMPLETE} differs from its checksum")
    for name, expected in marker["files"].items():
        if fingerprint(path / name) != expected:
            raise ValueError(f"{name} differs from its checksum")
    batches = {int(step): groups for step, groups in marker["batches"].items()}
    return Found(path, int(marker["step"]), DataCursor(**marker["data_cursor"]), int(marker["ranks"]), batches)


def _marker(found: Found, files: Mapping[str, Any]) -> dict[str, Any]:
    batches = {str(step): [list(group) for group in groups] for step, groups in found.batches.items()}
    marker = {
        "step": found.step,
        "data_cursor": asdict(found.data_cursor),
        "ranks": found.ranks,
        "batches": batches,
        "files": files,
    }
    return {**marker, "xxh3": _digest(marker)}


def _digest(marker: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(marker, sort_keys=True).encode())


def begin_save(engine: FSDPEngine, ranks: Ranks, path: Path) -> Future[Any]:
    """Copy this rank's shards and write them in a thread. A collective; the future is done when all ranks wrote."""
    state = {**_model_state(engine), f"rng_{ranks.rank}": torch.get_rng_state()}
    future = dcp.async_save(state, checkpoint_id=path, process_group=ranks.background)
    assert isinstance(future, Future)
    return future


def load(engine: FSDPEngine, ranks: Ranks, found: Found) -> None:
    """Restore weights, moments and, where this rank existed, the random state. A collective."""
    state = _model_state(engine)
    if ranks.rank < found.ranks:
        state[f"rng_{ranks.rank}"] = torch.get_rng_state()
    dcp.load(state, checkpoint_id=found.path)
    _restore(engine, state)
    if ranks.rank < found.ranks:
        torch.set_rng_state(state[f"rng_{ranks.rank}"])


def _model_state(engine: FSDPEngine) -> dict[str, Any]:
    model, optimizer = get_state_dict(engine.policy, engine.optimizer)
    state: dict[str, Any] = {"model": _learned(engine, model), "optimizer": optimizer}
    state["kl_coefficient"] = torch.tensor(engine.kl_coefficient, dtype=torch.float64)
    if engine.critic is not None:
        state["critic"], state["critic_optimizer"] = get_state_dict(engine.critic.module, engine.critic.optimizer)
    return state


def _learned(engine: FSDPEngine, model: dict[str, Any]) -> dict[str, Any]:
    """Under LoRA its matrices alone: all else is in the run's model folder."""
    if engine.adapter_settings is None:
        return model
    learning = {name for name, parameter in engine.policy.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in model.items() if name in learning}


def _restore(engine: FSDPEngine, state: dict[str, Any]) -> None:
    model, moments = state["model"], state["optimizer"]
    options = StateDictOptions(strict=engine.adapter_settings is None)
    set_state_dict(engine.policy, engine.optimizer, model_state_dict=model, optim_state_dict=moments, options=options)
    engine.kl_coefficient = float(state["kl_coefficient"])
    if engine.critic is not None:
        model, moments = state["critic"], state["critic_optimizer"]
        critic = engine.critic
        set_state_dict(critic.module, critic.optimizer, model_state_dict=model, optim_state_dict=moments)
