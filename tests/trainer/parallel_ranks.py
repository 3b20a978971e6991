"""Ranks of whole learners on this machine: parallel_ranks.py RANKS FOLDER MODEL CASES.

CASES is JSON: name → `config` of the trainer, `steps` to train from the start or, with `resume`, from the checkpoint in
FOLDER/name. Rank 0 leaves losses, gradient norms and all weights there; every rank its share of a checkpoint, and the
names of the threads it ends with. Two ranks go through `two_ranks_traps` as well.

Ranks are forked once everything is imported, since importing it takes each of them longer than all the cases do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - each rank would import it
import two_ranks_traps
from safetensors.torch import save_file
from tests.ports import free_port
from trainer_support import continued, make_trajectory, newest, taught

from penstock.trainer import BadJob, Learner, Ranks, TrainerConfig, make_step_batch
from penstock.trainer.batch import share_of
from penstock.trainer.engines.fsdp import FSDPEngine, activation_offload, local_part
from penstock.trainer.engines.fsdp.mesh import mesh_of
from penstock.trainer.engines.fsdp.sharded import check_copies
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import Batch, DataCursor
from penstock.weight_sync import Manifest, WeightFiles, WeightSource, read_verified, spread_shards

GROUPS, MEMBERS = 4, 3
ACTIVATION_OFFLOAD = "penstock.trainer.engines.fsdp.activation_offload"


def train_step(learner: Learner, engine: FSDPEngine, ranks: Ranks, step: int) -> dict[str, Any]:
    """Step `step` of the same batches on any number of ranks; returns its metrics."""
    members = [[make_trajectory(f"train/{step}/{g}", m, step) for m in range(MEMBERS)] for g in range(GROUPS)]
    members = [[continued(one, group[0].segments[0].prompt_ids) for one in group] for group in members]
    # Two groups have a teacher, each another number of likeliest ids.
    groups = [[taught(one, 3 + g) if g < 2 else one for one in group] for g, group in enumerate(members)]
    batch = Batch(step, [[t.episode_id for t in group] for group in groups])
    share = share_of(batch, ranks.data.rank, ranks.data.world, engine.config.minibatches)
    mine = [t for group in share for t in groups[group]]
    laid_out = make_step_batch(batch, share, mine, 0, engine.limits)
    scored = learner.score(laid_out)
    return learner.update(laid_out, scored, learner.advantages(laid_out, scored))


def run(everyone: Ranks, folder: Path, model: str, case: Mapping[str, Any]) -> None:
    config = TrainerConfig(**{"lr": 1e-3, "eps": 1e-4, "micro_batch_tokens": 64, **case["config"]})
    ranks = Ranks(everyone.device, everyone.background, config.parallel.layout, everyone.timeout)
    engine = FSDPEngine(model, config, ranks)
    learner = Learner(config, engine, ranks.data)
    store, first = CheckpointStore(folder / "checkpoints", keep=2), 0
    if ranks.is_rank0:
        store.open()
    if case.get("resume"):
        info = newest(store)
        engine.load(info.path, info.ranks)
        first = info.step
    check_timeouts(ranks)
    lines = [train_step(learner, engine, ranks, first + step) for step in range(case["steps"])]
    leave(folder, store, engine, ranks, first + case["steps"], lines)
    ranks.own(mesh_of).close()


def check_timeouts(ranks: Ranks) -> None:
    """Every group of the mesh has the timeout of the ranks, not the default of its backend."""
    mesh = ranks.own(mesh_of)
    groups = [group for part in (mesh._whole, mesh._experts) if part is not None for group in part.get_all_groups()]
    for group in [*groups, *([] if mesh.context is None else [mesh.context.group])]:
        assert group._get_backend(torch.device("cpu")).options._timeout == ranks.timeout


def leave(
    folder: Path, store: CheckpointStore, engine: FSDPEngine, ranks: Ranks, done: int, lines: list[dict[str, Any]]
) -> None:
    engine.begin_save(store.unfinished(done)).result(timeout=300)
    weights = {name: tensor.contiguous() for name, tensor in engine.weights(torch.float32)}
    if engine.adapter_settings is None:
        assert (engine.local_shards(torch.bfloat16) is None) == (ranks.layout.tensor > 1)
        check_stream(folder, engine, ranks, weights)
    if ranks.is_rank0:
        store.seal(done, DataCursor(), ranks.world, {})
        save_file(weights, folder / f"weights_{done}.safetensors")
        (folder / f"metrics_{done}.json").write_text(json.dumps(lines))
    if ranks.layout.replicate > 1:
        check_copies_are_found(engine, ranks)


def check_copies_are_found(engine: FSDPEngine, ranks: Ranks) -> None:
    """Trained sets of shards are copies to the bit; one value that differs is found by all ranks, and named."""
    check_copies([engine.policy], ranks)
    name, parameter = list(engine.policy.named_parameters())[3]
    local, _ = local_part(parameter)
    if ranks.rank == ranks.world - 1 and local.numel():
        with torch.no_grad():
            local.view(-1)[0] += 1.0
    with pytest.raises(BadJob, match=re.escape(name)):
        check_copies([engine.policy], ranks)


def check_stream(folder: Path, engine: Any, ranks: Ranks, weights: Mapping[str, torch.Tensor]) -> None:
    """What rank 0 fetches from the ranks, whatever the bucket, is what it gathers (`weights`, on rank 0), in a file
    too; each rank has its share of it."""
    source = WeightSource.open(ranks.rank, ranks.world, ranks.timeout)
    own, part_bytes = engine.local_shards(torch.bfloat16), 256
    if isinstance(engine, FSDPEngine):
        assert (own is None) == (ranks.layout.tensor > 1)
    sets = ranks.world // ranks.layout.replicate
    for shard in own or ():
        assert sum(shard.rank_bytes) == math.prod(shard.shape) * shard.published.itemsize, "each byte has one rank"
        assert not any(shard.rank_bytes[sets:]), "copies are not asked for"
    if own is None:
        own = list(spread_shards(engine.gathered_weights(), torch.bfloat16, ranks.rank, ranks.world, part_bytes))
        share = sum(shard.local.nbytes for shard in own)
        total = sum(sum(shard.rank_bytes) for shard in own)
        assert abs(share - total / ranks.world) < 2 * part_bytes + 2 * len(own), (share, total)
    source.take(1, own)
    if ranks.is_rank0:
        for bucket_bytes in (1000, 7777, 1 << 20):
            stream = torch.cat([bucket.clone() for bucket in source.buckets(1, bucket_bytes)])
            for tensor, piece in zip(source.tensors, stream.split([t.nbytes for t in source.tensors]), strict=True):
                assert torch.equal(piece.view(torch.bfloat16).view(tensor.shape), weights[tensor.name].bfloat16())
        assert sorted(tensor.name for tensor in source.tensors) == sorted(weights)
        written = read_verified(asyncio.run(write_file(folder / "published", source)))
        assert written.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in written.items())
    source.close()


async def write_file(folder: Path, source: WeightSource) -> Manifest:
    """Of the version that the ranks hold."""
    files = WeightFiles(folder, "disk")
    await files.open()
    try:
        return await asyncio.to_thread(files.write_from_ranks, 1, source)
    finally:
        await files.close()


def write_threads(folder: Path) -> None:
    """The names of this process's threads, one a line."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((thread / "comm").read_text())
    (folder / f"threads_{os.environ['RANK']}").write_text("".join(names))


def main(folder: Path, model: str, cases: Mapping[str, Any]) -> None:
    atexit.register(write_threads, folder)  # before the trainer registers anything: the last to be called
    everyone = Ranks.open(120.0)
    try:
        for name, case in cases.items():
            copy_to_host = activation_offload.copy_to_host
            spied = patch(f"{ACTIVATION_OFFLOAD}.copy_to_host", side_effect=copy_to_host)
            with patch(f"{ACTIVATION_OFFLOAD}.SMALLEST_BYTES", 1), spied as copied:
                run(everyone, folder / name, model, case)
            assert copied.called == case["config"].get("activation_offload", False), (
                "whether activations left the device"
            )
        if everyone.world == 2:
            two_ranks_traps.check(everyone, folder, model)
    finally:
        everyone.close()


def become_ranks(count: int) -> bool:
    """Forks `count` ranks with the environment that torchrun gives. True in each of them; False in this process, when
    all have ended. Raises `ChildProcessError` as soon as one fails, and ends the others."""
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a lock held by another thread would stay held for ever"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    running: set[int] = set()
    for rank in range(count):
        pid = os.fork()
        if not pid:
            os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
            return True
        running.add(pid)
    wait_for(running)
    return False


def wait_for(running: set[int]) -> None:
    try:
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status:
                raise ChildProcessError(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if become_ranks(int(sys.argv[1])):
        main(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
