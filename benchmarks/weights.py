"""What a version of the weights costs on its way: bytes of a delta, the time of a fetch, the pause of a server.

    penstock bench weights --json

Deltas are of real updates: AdamW on float32 master weights of a small Qwen3, published in bfloat16 after every step.
A fetch is what a server does while it decodes: bring the files here, read them, check every tensor. It is compared with
a plain copy of the same tensors in memory, taken in the same round. Broadcasts go from two trainer ranks to two workers
(`support/broadcasts.py`), beside a bare gloo broadcast of the same bytes; the bytes of each link are counted with four
ranks and four workers (`support/links.py`). Pauses are of two running servers under load,
updated in turn: each against its engine's own load of the same bytes, and with what the other one decodes meanwhile.
The private memory of vLLM's workers during an update is measured by `support.worker_memory`.

PENSTOCK_BENCH_ROUNDS sets the rounds (5), PENSTOCK_BENCH_WEIGHTS_MB the size of the fetched version (1024),
PENSTOCK_BENCH_UPDATES the updates per learning rate (40); of the pauses: PENSTOCK_BENCH_ENGINE (vllm; empty leaves them
out), PENSTOCK_BENCH_MODEL (100m), PENSTOCK_BENCH_DTYPE (bfloat16), PENSTOCK_BENCH_SWAPS (40, of both servers together).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import uvloop

from benchmarks.support.broadcasts import MOST_MB, broadcast_ratios, measure_broadcasts
from benchmarks.support.comparison import say
from benchmarks.support.links import measure_links
from benchmarks.support.measure import processor
from benchmarks.support.swaps import SwapExtent, measure_swaps, swap_ratios
from benchmarks.support.worker_memory import measure_worker_copy
from penstock.weight_sync import Downloader, FileServer, Transport, WeightPublisher, WeightReader

RATES = ("1e-6", "1e-5", "1e-4")
TRANSPORTS: tuple[Transport, ...] = ("shm", "disk", "http")
TENSORS = 64
LINKS_MB = 128
"""Of the version whose bytes are counted: eight processes, of which six hold all of it or a quarter."""
CHANGED_SHARE = 0.02
"""Of the fetched version's values, in its delta."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own, removed at the end
Seconds = dict[str, float]


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    rounds = int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "5"))
    size_mb = int(os.environ.get("PENSTOCK_BENCH_WEIGHTS_MB", "1024"))
    updates = int(os.environ.get("PENSTOCK_BENCH_UPDATES", "40"))
    deltas = {rate: _real_updates(float(rate), updates) for rate in RATES}
    fetches = _fetches(rounds, size_mb)
    broadcasts = measure_broadcasts(rounds, min(size_mb, MOST_MB))
    links = measure_links(min(size_mb, LINKS_MB))
    swaps = SwapExtent.read()
    pauses = uvloop.run(measure_swaps(swaps)) if swaps.engine else {}
    copies = uvloop.run(measure_worker_copy(swaps.dtype)) if swaps.engine == "vllm" else {}
    return {
        "bench": "weights",
        "ratio": _ratios(deltas, fetches)
        | broadcast_ratios(broadcasts)
        | links
        | swap_ratios(pauses)
        | ({"worker_copy_over_model": copies["private_over_model"]} if copies else {}),
        "figures": {
            "delta": deltas,
            "fetch_s": {name: round(seconds, 4) for name, seconds in fetches.items()},
            "broadcast": {name: round(value, 4) for name, value in broadcasts.items()},
            "pause": pauses,
            "worker_copy": copies,
        },
        "setup": {
            **processor(),
            "pause": swaps.setup(),
            "rounds": rounds,
            "version_mb": size_mb,
            "broadcast_mb": min(size_mb, MOST_MB),
            "updates": updates,
            "changed_share_of_fetched_delta": CHANGED_SHARE,
            "torch_threads": 1,
        },
    }


def _ratios(deltas: dict[str, dict[str, float]], fetches: Seconds) -> dict[str, float]:
    ratios = {f"delta_bytes_over_full_{rate}": found["bytes_over_full"] for rate, found in deltas.items()}
    for name, seconds in fetches.items():
        if name != "copy":
            ratios[f"fetch_{name}_over_copy"] = round(seconds / fetches["copy"], 2)
    return ratios


# deltas --------------------------------------------------------------------------------------------------------------
def _real_updates(rate: float, updates: int) -> dict[str, float]:
    """Means over all updates but the first version, which is full."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        publisher = WeightPublisher(Path(folder), "shm", full_every=updates + 2)
        sizes, values = [], 0
        for version, weights in enumerate(_trained(rate, updates), 1):
            manifest = publisher.write(version, weights.items())
            values = sum(tensor.numel() for tensor in weights.values())
            sizes.append(manifest.bytes)
    full, deltas = sizes[0], sizes[1:]
    say(f"weights: learning rate {rate:g}")
    return {
        "bytes_over_full": round(mean(deltas) / full, 4),
        "largest_over_full": round(max(deltas) / full, 4),
        "values": values,
    }


def _trained(rate: float, updates: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights before the first update, and after each."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(updates + 1):
        yield {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}
        ids = torch.randint(0, model.config.vocab_size, (4, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _model() -> Any:
    """4 M values, tied: every row of the embedding has a gradient. Weights of the usual deviation, 0.02."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
        )
    )  # fmt: skip


# fetches -------------------------------------------------------------------------------------------------------------
def _fetches(rounds: int, size_mb: int) -> Seconds:
    """Medians of the rounds: a memory copy, and full and delta over each transport."""
    first = _version(size_mb)
    second = {name: _changed(tensor) for name, tensor in first.items()}
    taken: dict[str, list[float]] = {}
    with _folder(SHARED_MEMORY) as memory, _folder(None) as disk:
        for number in range(rounds):
            _note(taken, {"copy": _copy(first)})
            for transport in TRANSPORTS:
                _note(taken, _one_fetch(transport, disk if transport == "disk" else memory, first, second))
            say(f"weights: round {number + 1} of {rounds}")
    return {name: median(seconds) for name, seconds in taken.items()}


def _version(size_mb: int) -> dict[str, torch.Tensor]:
    values = size_mb * (1 << 20) // 2 // TENSORS
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}": torch.randn(values, generator=generator).mul_(0.02).bfloat16() for n in range(TENSORS)}


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.randint(0, tensor.numel(), (int(tensor.numel() * CHANGED_SHARE),))
    changed = tensor.clone()
    changed.view(torch.int16)[places] ^= 1
    return changed


def _copy(tensors: dict[str, torch.Tensor]) -> float:
    began = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors.values()]
    took = time.perf_counter() - began
    copies.clear()
    return took


def _one_fetch(
    transport: Transport, folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> Seconds:
    token = secrets.token_hex(8)
    published, fetched = folder / "published", folder / "fetched"
    with _served(published, token) as url:
        publisher = WeightPublisher(published, transport, full_every=8, base_url=url)
        downloader, reader = Downloader(fetched, token), WeightReader()
        taken = {}
        for kind, version, tensors in (("full", 1, first), ("delta", 2, second)):
            manifest = publisher.write(version, tensors.items())
            began = time.perf_counter()
            reader.read(downloader.localise(manifest))
            taken[f"{transport}_{kind}"] = time.perf_counter() - began
    downloader.close()
    publisher.close()
    return taken


@contextmanager
def _served(folder: Path, token: str) -> Iterator[str]:
    """The URL of a file server that runs as a trainer's does: on a uvloop in a thread of its own."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = FileServer(folder, token)
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _note(taken: dict[str, list[float]], new: Seconds) -> None:
    for name, seconds in new.items():
        taken.setdefault(name, []).append(seconds)
