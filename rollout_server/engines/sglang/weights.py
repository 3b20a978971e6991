"""A version on its way into SGLang: a folder with one file that it loads, and the checksums that it must report then.

What comes by a broadcast is received by the sidecar, into memory that is the version's file: SGLang's own way of
receiving (`/update_weights_from_distributed`) would do so in the pause, and leave half a version where a member dies.

SGLang loads a folder of safetensors files and reports the checksum of every parameter that it holds, which can be
computed from the file (`checksums`), for fused parameters from their parts. Which parameters have one that agrees is
determined at the server's start, on its first weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import check_complete
from penstock.rollout_server.engines.http.server_process import ChildServer
from penstock.rollout_server.engines.http.stream import AnswerStream
from penstock.rollout_server.engines.http.weights import HttpWeights
from penstock.rollout_server.engines.sglang.checksums import expected_checksums, first_difference, folder_tensors
from penstock.rollout_server.protocol import EngineError, SleepLevel
from penstock.weight_sync import Manifest, WeightsRefused

if TYPE_CHECKING:
    from penstock.weight_sync import MappedVersion  # and with it torch

PAUSES = {"keep": "in_place", "recompute": "retract", "abort": "abort"}
"""rollout.pause → SGLang's word."""
MEMORY_TAGS = ["weights", "kv_cache", "cuda_graph"]
SAMPLE_EVERY = 16
Fetched = tuple[Path, dict[str, str], "MappedVersion"]
"""(a folder that holds the version, the checksums that SGLang must report after loading it, the version)"""


class VersionReader:
    """Reads versions, whole or as changes of the one before, into what SGLang can be shown."""

    def __init__(self) -> None:
        from penstock.weight_sync import StagedMemory, WeightReader

        self.staged = StagedMemory()
        """Versions that are received by broadcasts."""
        self._reader = WeightReader()

    def read(self, manifest: Manifest) -> tuple[int, MappedVersion]:
        """(descriptor of a safetensors file with the whole version, the version).

        The descriptor is the caller's to close. A trainer that deletes the file meanwhile changes nothing. Raises
        `WeightsRefused`; `WeightsUnreachable` where the version's broadcast is not held.
        """
        # What a sidecar has fetched is a file, whatever it was announced as.
        source = self.staged.take if manifest.transport == "broadcast" else self._reader.read
        version = source(manifest)
        return os.dup(version.descriptor), version


@contextmanager
def shown_as_folder(file: int, folder: Path) -> Iterator[Path]:
    """`folder`, holding nothing but a link to this process's descriptor `file`; both go at the end."""
    try:
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


class SGLangWeights(HttpWeights[Fetched]):
    """Loads weights from files, of which some are in memory alone, and compares the checksums that SGLang reports
    afterwards.
    """

    version_path = "/model_info"

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        super().__init__(config, model, server, streams)
        self.checked: list[str] = []
        """SGLang's parameters whose checksums on every rank we can compute."""
        self._ranks = 1
        self._released: list[str] = []
        self.reader = VersionReader()

    async def _look(self) -> list[str]:
        ranks = await self._checksums()
        self._ranks = len(ranks)
        tensors = await asyncio.to_thread(folder_tensors, self.model)
        names = list(ranks[0]) if ranks else []
        expected = await asyncio.to_thread(self._expected, tensors, names)
        # Ranks hold parts of some parameters; engines pad, pack and quantise others.
        self.checked = [
            name for name in sorted(expected) if all(checksums.get(name) == expected[name] for checksums in ranks)
        ]
        if not self.checked:
            return ["weights are verified before loading only: this SGLang's checksums cannot be computed here"]
        if len(self.checked) == len(expected):
            return []
        part = f"{len(self.checked)} of {len(expected)} parameters"
        return [f"what {part} hold is verified after loading, of the others before it only: they are held otherwise"]

    @asynccontextmanager
    async def _fetch(self, manifest: Manifest) -> AsyncGenerator[Fetched]:
        file, expected, version = await asyncio.to_thread(self._read, manifest)
        with shown_as_folder(file, self.server.folder / f"weights-{manifest.version}") as folder:
            yield folder, expected, version

    def _read(self, manifest: Manifest) -> tuple[int, dict[str, str], MappedVersion]:
        check_complete(manifest, self.shapes)
        file, version = self.reader.read(manifest)
        # Sums for a GPU take some seconds per 10 GB: one version has those of some parameters, sixteen those of all.
        every = max(1, min(SAMPLE_EVERY, len(self.checked))) if self._on_device else 1
        return file, self._expected(version, self.checked[manifest.version % every :: every]), version

    def _expected(self, tensors: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
        return expected_checksums(tensors, names, self.config.dtype, on_device=self._on_device)

    @property
    def _on_device(self) -> bool:
        return self.server.installation is not None and not self.server.installation.cpu

    async def _pause(self) -> None:
        await self.server.call("POST", "/pause_generation", {"mode": PAUSES[self.config.pause]})

    async def _load(self, version: int, fetched: Fetched) -> None:
        body = {
            "model_path": str(fetched[0]),
            "weight_version": str(version),
            "abort_all_requests": False,
            # With requests frozen in place it would be refused, and the update with it; the salts do its work.
            "flush_cache": self.config.pause != "keep",
        }
        await self.server.call("POST", "/update_weights_from_disk", body)

    async def _verify(self, fetched: Fetched) -> None:
        """Until it returns the version's file must be there: to a load SGLang answers when its first rank has read it.

        Checksums are gathered from all ranks, so each has read it by then.
        """
        _, expected, version = fetched
        ranks = await self._checksums(all_of_them=bool(expected)) if expected or self._ranks > 1 else []
        for rank, checksums in enumerate(ranks):
            if name := first_difference(expected, checksums):
                raise EngineError(f"rank {rank} of SGLang loaded other values than the version has in {name}")
        try:
            version.check_unchanged()  # SGLang read the file itself, after it was verified
        except WeightsRefused as error:
            raise EngineError(str(error)) from error

    async def _resume(self) -> None:
        # Its default empties the cache of a GPU, and fails if there is none.
        await self.server.call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def _sleep(self, level: SleepLevel) -> None:
        """Frees the memory. At level 1 a copy of the weights stays in host memory, if the server has one."""
        # Without that copy they are lost: then they are not moved, unless they may be dropped.
        self._released = MEMORY_TAGS if level == self.server.sleep_level else MEMORY_TAGS[1:]
        await self.server.call("POST", "/pause_generation", {"mode": "abort"})
        await self.server.call("POST", "/release_memory_occupation", {"tags": self._released})

    async def _wake(self) -> None:
        await self.server.call("POST", "/resume_memory_occupation", {"tags": self._released})
        if not self.dropped:
            await self._resume()

    async def _checksums(self, *, all_of_them: bool = True) -> list[dict[str, str]]:
        """Checksums of each parameter, for each rank; of no parameter unless `all_of_them`."""
        body: dict[str, Any] = {"action": "checksum"}
        if not all_of_them:
            body["skip_tensor_list"] = [""]  # names that contain it
        answer = await self.server.call("POST", "/weights_checker", body)
        return [dict(rank["checksums"]) for rank in answer.get("ranks") or []]
