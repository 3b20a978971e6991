"""Checkpoints of the engine: weights and moments by Hugging Face's names, whatever the layout that wrote them.

    step_00000010/
        megatron.json                    updates taken, KL coefficient
        weights/                         a Hugging Face folder of float32 masters
        exp_avg/  exp_avg_sq/            the same of Adam's moments; not before the first update
            rank_03.safetensors          every world-th tensor: each rank writes its share
            model.safetensors.index.json, config.json
        rng_00.safetensors               random state of each rank

The moments of a parameter have its shape, so they are converted as weights are: another number of tensor, pipeline,
expert or data-parallel ranks reads them. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.trainer.engines.megatron.bridge import ModelBridge
from penstock.trainer.engines.megatron.optimizer import MASTER, MOMENTS, Optimizer, WholeStates, make_moments
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.state.checkpoint import fingerprint, leave_fingerprints

ABOUT = "megatron.json"
FOLDERS = {MASTER: "weights", **{name: name for name in MOMENTS}}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StateShare:
    """The files of one folder that one rank writes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Every tensor's file, the other ranks' too."""


class State:
    """The state of a run that is in the engine's tensors. Every method is a collective."""

    def __init__(self, models: list[nn.Module], bridge: ModelBridge, optimizer: Optimizer, ranks: Ranks) -> None:
        self._models = models
        self._bridge = bridge
        self._optimizer = optimizer
        self._ranks = ranks

    def begin_save(self, path: Path, kl_coefficient: float) -> Future[None]:
        """Copy, then write in a thread; the future is done when all ranks wrote, and raises `OSError` on all of them
        where one could not."""
        shares = {FOLDERS[key]: self._share(key) for key in self._keys()}
        about = {"updates": self._optimizer.updates, "kl_coefficient": kl_coefficient}
        random = torch.get_rng_state()
        pool = ThreadPoolExecutor(1, "checkpoint")
        try:
            return pool.submit(self._write, path, shares, about, random)
        finally:
            pool.shutdown(wait=False)

    def load(self, checkpoint: Path, written_by: int) -> float:
        """The KL coefficient. Raises `ValueError` where another engine wrote the checkpoint."""
        if not (checkpoint / ABOUT).is_file():
            raise ValueError(
                f"{checkpoint} was not written by trainer.engine megatron: continue with the engine that wrote it"
            )
        about: dict[str, Any] = json.loads((checkpoint / ABOUT).read_text())
        self._optimizer.updates = int(about["updates"])
        if self._optimizer.updates:
            make_moments(self._optimizer.megatron, self._optimizer.updates)
        for key in self._keys():
            states = WholeStates(self._optimizer.megatron, key)
            self._bridge.load(self._models, checkpoint / FOLDERS[key], states.write)
        if self._ranks.rank < written_by:
            torch.set_rng_state(load_file(checkpoint / f"rng_{self._ranks.rank:02d}.safetensors")["cpu"])
        self._optimizer.clear()
        return float(about["kl_coefficient"])

    def _keys(self) -> Sequence[str]:
        return (MASTER, *MOMENTS) if self._optimizer.updates else (MASTER,)

    def export(self, key: str = MASTER) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full float32 tensor) of the masters or a moment, on all ranks. To be read to its end."""
        yield from self._bridge.export(self._models, WholeStates(self._optimizer.megatron, key).read)

    def _share(self, key: str) -> StateShare:
        share = StateShare()
        for number, (name, tensor) in enumerate(self.export(key)):
            writer = number % self._ranks.world
            share.files[name] = f"rank_{writer:02d}.safetensors"
            if writer == self._ranks.rank:
                share.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return share

    def _write(self, path: Path, shares: dict[str, StateShare], about: dict[str, Any], random: Tensor) -> None:
        problem: Exception | None = None
        try:
            own, of_random = (f"{kind}_{self._ranks.rank:02d}.safetensors" for kind in ("rank", "rng"))
            for name, share in shares.items():
                (path / name).mkdir(parents=True, exist_ok=True)
                save_file(share.tensors, path / name / own)
                if self._ranks.is_rank0:
                    index = {"metadata": {}, "weight_map": share.files}
                    (path / name / INDEX).write_text(json.dumps(index, indent=1))
                    self._bridge.save_settings(path / name)
            save_file({"cpu": random}, path / of_random)
            if self._ranks.is_rank0:
                (path / ABOUT).write_text(json.dumps(about))
            written = {name: fingerprint(path / name) for name in (*(f"{name}/{own}" for name in shares), of_random)}
            leave_fingerprints(path, self._ranks.rank, written)
        except (OSError, SafetensorError) as error:
            problem = error
        failed = torch.tensor(float(problem is not None))
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._ranks.background)
        if failed:
            raise OSError(f"checkpoint {path}: {problem or 'another rank could not write its share'}") from problem
