"""Private memory of vLLM's workers during updates, beyond what they had before the first, over the model's bytes.

A real vLLM of two tensor-parallel ranks loads full versions over ``shm``. Anonymous memory of each worker, from the
kernel's smaps_rollup, is read every few milliseconds from the announcement until the comparison has ended. The workers'
allocator gives back at once what is freed, so that only memory in use counts, vLLM's own while it reloads a layer
included.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

from benchmarks.support.comparison import say
from benchmarks.support.model import SIZES, make_model
from penstock.rollout_server import RolloutConfig, make_engine
from penstock.weight_sync import WeightPublisher

RANKS = 2
SIZE = "77m"
"""Of `benchmarks.support.model`: its heads can be split in two, its largest tensor is 3 % of it, as in large models."""
SAMPLE_S = 0.005
UPDATES = 3
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own, removed at the end
PROC = Path("/proc")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc's settings, in bytes; by default it keeps freed blocks of up to 32 MB for itself."""


async def measure_worker_copy(dtype: str, size: str = SIZE) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=SHARED_MEMORY) as folder:
        model = make_model(SIZES[size], dtype)
        model.save_pretrained(Path(folder) / "model")
        first = {name: tensor.detach() for name, tensor in model.named_parameters()}
        engine: Any = make_engine(_config(dtype), f"{folder}/model", Path(folder), 0)
        with patch.dict(os.environ, GIVES_BACK):
            await engine.start()
        try:
            copies = await _updates(engine, first, Path(folder) / "published")
        finally:
            await engine.stop()
    size_bytes = sum(tensor.nbytes for tensor in first.values())
    over_model = [round(copy / size_bytes, 4) for copy in copies]
    return {
        "model_mb": round(size_bytes / 1e6, 1),
        "ranks": RANKS,
        "over_model_by_update": over_model,
        "private_over_model": max(over_model),
    }


async def _updates(engine: Any, first: dict[str, Any], folder: Path) -> list[int]:
    """Of each update the most bytes of all workers together, beyond those before the first one."""
    publisher, copies = WeightPublisher(folder, "shm"), []
    workers = worker_pids(engine.server.pid)
    if len(workers) != RANKS:
        raise RuntimeError(f"vLLM has workers {workers}, not {RANKS}")
    before = memory_of(workers)
    for version in range(1, UPDATES + 1):
        manifest = publisher.write(version, {name: t * (1 + version / 8) for name, t in first.items()}.items())
        with PrivateMemory(workers) as private:
            report = await engine.load_weights(manifest)
            await engine.weights.until_verified()
        copies.append(private.most - before)
        say(f"weights: {RANKS} ranks v{version}: {copies[-1]} bytes, load {report.load_s:.3f} s")
    publisher.close()
    return copies


class PrivateMemory:
    """Sampled from a thread while the block runs."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.most = 0

    def __enter__(self) -> PrivateMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.most = max(self.most, memory_of(self._pids))


def memory_of(pids: list[int]) -> int:
    """Anonymous bytes of all of them together, as the kernel's smaps_rollup has them."""
    lines = (line for pid in pids for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines())
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def worker_pids(group: int) -> list[int]:
    """Of vLLM's tensor-parallel ranks, by the title that they give themselves."""
    found = []
    for entry in PROC.iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                title = (entry / "cmdline").read_text(errors="replace")
                found += [int(entry.name)] if "Worker_TP" in title else []
        except (OSError, ProcessLookupError):
            continue
    return sorted(found)


def _config(dtype: str) -> RolloutConfig:
    return RolloutConfig(
        engine="vllm",
        dtype=dtype,
        max_model_len=512,
        max_concurrent=4,
        kv_cache_tokens=4096,
        start_timeout_s=600.0,
        request_timeout_s=600.0,
        vllm_args={"tensor_parallel_size": RANKS},
    )


def main() -> None:
    """``python -m benchmarks.support.worker_memory [SIZE]``: this figure alone."""
    import json
    import sys

    size = sys.argv[1] if len(sys.argv) > 1 else SIZE
    print(json.dumps(asyncio.run(measure_worker_copy("bfloat16", size))))


if __name__ == "__main__":
    main()
