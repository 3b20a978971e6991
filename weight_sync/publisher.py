"""The trainer's side: versions as files in one folder, whole (*full*) or as changes of the version before (*delta*).

write_from(7)   the ranks' copies, compared with those before ──► delta file, or full if due, required or not larger
                delete what no late joiner needs ──► manifest
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.common import private_folder
from penstock.weight_sync.broadcast.offer import BUCKET_BYTES
from penstock.weight_sync.broadcast.sender import stream_version
from penstock.weight_sync.broadcast.shards import Shard
from penstock.weight_sync.broadcast.source import WeightSource
from penstock.weight_sync.delta_writer import DeltaPlan, plan_delta, write_delta
from penstock.weight_sync.files.file_format import (
    ADAPTER,
    FULL,
    NamedTensors,
    Section,
    WrittenFile,
    describe,
    write_file,
)
from penstock.weight_sync.lora.adapter import AdapterConfig, changes_of, check_base
from penstock.weight_sync.lora.merger import ModelFolder
from penstock.weight_sync.manifest import (
    FILE_NAME,
    SERVED,
    AdapterSpec,
    ChainFile,
    Manifest,
    TensorEntry,
    Transport,
    state_of,
)

Tensors = dict[str, torch.Tensor]


class WeightPublisher:
    """Writes versions into a folder that it owns. One thread at a time calls it.

    `full_every`: every this many versions one is full (1: all are); above 1 a copy of what `write` was given last stays
    in memory, and under `write_from` the ranks have theirs.
    The files of the newest `keep` versions stay, each with all of its chain. `base_url` is where servers find
    the folder's files (`file_server`). `model`, the folder of version 0, is needed for adapters only.
    `epoch`: the trainer's (`TransferQueue.claim_training`), part of each file's name. A trainer that was replaced and
    does not know it yet, for instance because it was suspended in mid-write, touches no file of a later epoch.
    """

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        keep: int = 2,
        *,
        full_every: int = 1,
        base_url: str | None = None,
        model: Path | None = None,
        epoch: int = 0,
    ) -> None:
        if transport in SERVED and not base_url:
            raise ValueError(f"the {transport} transport needs the URL under which the files are served")
        self.directory = Path(directory)
        self.transport: Transport = transport
        self.keep = max(1, keep)
        self.full_every = max(1, full_every)
        self._base_url = base_url
        self._model = model
        self._epoch = epoch
        self._base: ModelFolder | None = None
        self._chain: list[ChainFile] = []
        """The files of the version written last; empty where the next one has to be full."""
        self._own = WeightSource(finds_changes=True)
        """Copies of what `write` is given, where deltas may follow: the caller may change its tensors."""
        if self.durable:
            # On a shared disk, in the run's folder: who may enter that, and as which user, is that disk's matter.
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            private_folder(self.directory)
        for leftover in self.directory.glob("*.tmp"):
            if _epoch_of(leftover.name) <= epoch:
                leftover.unlink(missing_ok=True)

    def write(self, version: int, tensors: NamedTensors) -> Manifest:
        """Write `version` and return its manifest. Raises `NoSpace`; the versions before are as they were then.

        Where all versions are full and nothing else holds `tensors`, each is freed once it is in the file: model and
        file together never take the memory of two. Where deltas may follow, each is freed once it is copied.
        """
        if self.full_every > 1:
            self._own.take(
                version,
                (Shard(name, tuple(one.shape), one.dtype, (one.nbytes,), one) for name, one in _unique(tensors)),
            )
            return self.write_from(version, self._own)
        named = {name: tensor.detach().cpu() for name, tensor in _unique(tensors)}
        described = tuple(describe(*item) for item in named.items())
        written = self._write_whole(version, named, described, {"penstock": FULL})
        return self.adopt(version, written, described)

    def write_from(self, version: int, source: WeightSource) -> Manifest:
        """Write `version` from the copies of the trainer's ranks, as a delta if it can be one. Blocks.

        Raises `NoSpace`, `Superseded`, and `RuntimeError` where a rank is gone; what follows is full then.
        """
        chain, self._chain = self._chain, []
        plan = self._plan(version, source, chain)
        if plan is None:
            streamed = stream_version(
                source, version, self.path_of(version), write=True, bucket_bytes=BUCKET_BYTES, durable=self.durable
            )
            return self.adopt(version, streamed.written, streamed.tensors)
        base, path = chain[-1], self._path(version, ".delta")
        written, described = write_delta(
            path, source, version, plan, base.state, bucket_bytes=BUCKET_BYTES, durable=self.durable
        )
        self._chain = [*chain, self._link(version, base.version, written, state_of(described))]
        return self._announced(version, described)

    def write_adapter(self, version: int, tensors: NamedTensors, config: Mapping[str, Any]) -> Manifest:
        """Write a LoRA adapter as `version`: servers add it to the model folder's weights (`merge`).

        `tensors` in peft's names (``get_peft_model_state_dict``), `config` as ``LoraConfig.to_dict()`` has it. Raises
        `BadAdapter` naming what cannot be merged, `NoSpace`; nothing is written then. The next `write` is full.
        """
        if self._model is None:
            raise ValueError("adapters need the model folder of version 0: give it as `model`")
        named = {name: tensor.detach().cpu() for name, tensor in _unique(tensors)}
        settings = AdapterConfig.from_peft(config)
        base = self._base = self._base or ModelFolder(self._model)
        check_base(changes_of(settings, named), base.entries())
        described = tuple(describe(*item) for item in named.items())
        adapter = AdapterSpec(settings.as_dict(), base.state())
        metadata = {"penstock": ADAPTER, "adapter": json.dumps(asdict(adapter))}
        link = self._link(version, None, self._write_whole(version, named, described, metadata), state_of(described))
        self._chain = []
        self._delete_others(version)
        return Manifest(self.transport, (link,), described, adapter=adapter)

    def path_of(self, version: int) -> Path:
        """The file of a full version."""
        return self._path(version)

    def adopt(self, version: int, written: WrittenFile, tensors: tuple[TensorEntry, ...]) -> Manifest:
        """The manifest of a full version that another has written under `path_of`, or writes when it is asked for."""
        self._forget_delta(version)
        self._chain = [self._link(version, None, written, state_of(tensors))]
        return self._announced(version, tensors)

    def _announced(self, version: int, tensors: tuple[TensorEntry, ...]) -> Manifest:
        self._delete_others(version)
        return Manifest(self.transport, tuple(self._chain), tensors, deltas_follow=self.full_every > 1)

    def close(self) -> None:
        """Delete every version: the run is over."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _plan(self, version: int, source: WeightSource, chain: Sequence[ChainFile]) -> DeltaPlan | None:
        """None where `version` is to be full."""
        due = not chain or len(chain) >= self.full_every
        if due or version <= chain[-1].version:
            return None
        plan = plan_delta(source, version)
        return plan if plan is not None and plan.base == chain[-1].version else None

    def _write_whole(
        self, version: int, named: Tensors, described: Iterable[TensorEntry], metadata: Mapping[str, str]
    ) -> WrittenFile:
        checksums = json.dumps({entry.name: entry.xxh3 for entry in described}, separators=(",", ":"))
        sections = [Section.of_tensor(name, tensor) for name, tensor in named.items()]
        named.clear()
        written = write_file(self._path(version), sections, {**metadata, "xxh3": checksums}, durable=self.durable)
        self._forget_delta(version)
        return written

    def _forget_delta(self, version: int) -> None:
        """A delta with the number of a full version is of a life that was taken back."""
        self._path(version, ".delta").unlink(missing_ok=True)

    def _link(self, version: int, base_version: int | None, written: WrittenFile, state: str) -> ChainFile:
        place = f"{self._base_url}/{written.path.name}" if self.transport in SERVED else str(written.path)
        return ChainFile(version, base_version, place, written.bytes, written.xxh3, state)

    def _path(self, version: int, kind: str = "") -> Path:
        epoch = f"-e{self._epoch}" if self._epoch else ""
        return self.directory / f"weights-{version:08d}{epoch}{kind}.safetensors"

    @property
    def durable(self) -> bool:
        """True if a version's file survives a power cut once it is written."""
        return self.transport == "disk"

    def _delete_others(self, version: int) -> None:
        """All but the newest `keep` up to `version` and what they build on, and but those of later epochs.

        Later versions are of a life that the queue has forgotten: were they counted, the present version would go.
        """
        ours = [path for path in self.directory.glob("weights-*.safetensors") if _epoch_of(path.name) <= self._epoch]
        needed = needed_files([path.name for path in ours], version, self.keep)
        for path in ours:
            if path.name not in needed:
                path.unlink(missing_ok=True)


def needed_files(names: Iterable[str], version: int, keep: int) -> set[str]:
    """Return the files of the newest `keep` versions up to `version`, with their chains.

    Of one version in several epochs the last counts: those before were never announced. A chain is of one epoch.
    """
    matches = [match for name in names if (match := FILE_NAME.fullmatch(name)) and int(match[1]) <= version]
    files = {(int(match[2] or 0), int(match[1])): match for match in matches}
    last_epoch = {number: epoch for epoch, number in sorted(files)}
    needed: set[str] = set()
    for newest in sorted(last_epoch)[-keep:]:
        epoch = last_epoch[newest]
        for number in sorted((n for e, n in files if e == epoch and n <= newest), reverse=True):
            needed.add(files[epoch, number][0])
            if not files[epoch, number][3]:
                break
    return needed


def _epoch_of(name: str) -> int:
    """Return the epoch of a version's file, or of one that is being written."""
    match = FILE_NAME.search(name)
    return int(match[2] or 0) if match else 0


def _unique(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises `ValueError` for a name that comes twice."""
    names = set[str]()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} is given twice")
        names.add(name)
        yield name, tensor
        del tensor
