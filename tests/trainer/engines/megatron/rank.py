"""Ranks with engine megatron: rank.py CASES.

CASES is a JSON file, a list of {case, folder, model, ranks, settings}: they run one after the other, each with a
process group and an engine of its own. Under torchrun this is one rank; alone it forks them, once everything is
imported, since importing it takes each of them longer than most cases do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch

if not torch.cuda.is_available():
    import cpu_layers
    import cpu_shim  # before anything of megatron

import torch.distributed as dist
from mbridge.core.safetensor_io import SafeTensorIO
from parallel_ranks import become_ranks, check_stream
from replayed_rows import DIVISOR, SETTINGS, by_row, packs_of, told_rows, weighted
from safetensors.torch import save_file
from trainer_support import make_job, make_trajectory, newest

from benchmarks.support.meter import Meter
from penstock.common import die_with_parent
from penstock.trainer import BadJob, Learner, Ranks, TrainerConfig, make_step_batch, train
from penstock.trainer.batch import share_of
from penstock.trainer.engines.fsdp.saved_model import save_tensors
from penstock.trainer.engines.megatron.engine import MegatronEngine
from penstock.trainer.engines.megatron.optimizer import MASTER, WholeStates
from penstock.trainer.metrics import router_metrics
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import Batch, DataCursor

FIRST_STEPS = 2
EXPORT_FILE_BYTES = 40_000


def run(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """A whole run of the trainer."""
    job = make_job(folder, model, settings)
    job.run.queue.twin = os.environ["RANK"] != "0"
    asyncio.run(train(job))


def run_with_sequence_parallelism(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """The same, tensor ranks sharing out the tokens between their matrices."""
    with cpu_shim.sequence_parallelism():
        run(folder, model, settings)


def round_trip(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """What the engine publishes of the weights that it loaded, by each way, and what it exports, in small files."""

    def publish(engine: MegatronEngine, ranks: Ranks) -> None:
        weights = keep(folder / "published.safetensors", engine, ranks)
        check_stream(folder, engine, ranks, weights)
        in_small_files = partial(save_tensors, file_bytes=EXPORT_FILE_BYTES)
        with mock.patch("penstock.trainer.engines.megatron.engine.save_tensors", in_small_files):
            engine.save_model(folder / "exported")

    with mock.patch.object(SafeTensorIO, "load_some_hf_weight", one_tensor_at_a_time(SafeTensorIO.load_some_hf_weight)):
        with_engine(model, settings, publish)


def one_tensor_at_a_time(load: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    """`load` of mbridge's file reader: a first tensor rank that reads all of its stage at once has it on the host."""

    def load_one(self: SafeTensorIO, names: list[str]) -> dict[str, torch.Tensor]:
        assert len(names) == 1, names
        return load(self, names)

    return load_one


def first_steps(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """Steps 0 and 1, a checkpoint of them beside `folder`, step 2."""

    def steps(engine: MegatronEngine, ranks: Ranks) -> None:
        for step in range(FIRST_STEPS):
            train_one(engine, ranks, step)
        store = CheckpointStore(folder.parent / "checkpoints", keep=2)
        keep(folder / "saved.safetensors", engine, ranks)
        writing = engine.begin_save(store.unfinished(FIRST_STEPS))
        # The checkpoint has the state at the call, whatever comes after.
        train_one(engine, ranks, FIRST_STEPS)
        writing.result(timeout=300)
        if ranks.is_rank0:
            store.seal(FIRST_STEPS, DataCursor(), ranks.world, {})
        keep(folder / "trained.safetensors", engine, ranks)

    with_engine(model, settings, steps)


def next_step(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """Step 2 from that checkpoint."""

    def step(engine: MegatronEngine, ranks: Ranks) -> None:
        info = newest(CheckpointStore(folder.parent / "checkpoints", keep=2))
        engine.load(info.path, info.ranks)
        write_held_bytes(folder / f"held_{ranks.rank}.json", engine, info.path / "weights")
        keep(folder / "saved.safetensors", engine, ranks)
        train_one(engine, ranks, FIRST_STEPS)
        keep(folder / "trained.safetensors", engine, ranks)

    with_engine(model, settings, step)


def write_held_bytes(path: Path, engine: MegatronEngine, weights: Path) -> None:
    """The most bytes that a save and a load of one state take at a time, and those of the rank's parameters.

    gloo's threads free what they moved, which the meter does not see: what is loaded is counted where it arrives.
    """
    state, values, loaded = engine._state, WeakSet[torch.Tensor](), list[int]()
    states = WholeStates(state._optimizer.megatron, MASTER)

    def write(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        values.add(value)
        loaded.append(sum(one.nbytes for one in values))
        states.write(parameter, value)

    with Meter(memory=True, device=torch.device("cpu")) as meter:
        deque(state.export(), 0)
    state._bridge.load(state._models, weights, write)
    whole = sum(4 * one.numel() for model in state._models for one in model.parameters())
    path.write_text(json.dumps({"all": whole, "save": meter.peak_bytes, "load": max(loaded)}))


def bad_step(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """A step that must leave no trace, and what it reports."""

    def step(engine: MegatronEngine, ranks: Ranks) -> None:
        keep(folder / "before.safetensors", engine, ranks)
        metrics = train_one(engine, ranks, 0)
        keep(folder / "after.safetensors", engine, ranks)
        (folder / f"updates_{ranks.rank}").write_text(f"{metrics['updates']} {metrics['updates_skipped']}")

    with_engine(model, settings, step)


def replay(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """Logprobs, gradients and loads of rows whose tokens are told their experts."""

    def learn(engine: MegatronEngine, ranks: Ranks) -> None:
        packs = packs_of(told_rows(engine.limits)[ranks.data.rank :: ranks.data.world])
        logprobs = by_row(packs, engine.score(packs))
        update = engine.update(packs, weighted, DIVISOR, 0)
        loads = engine.take_router_loads()
        assert loads is not None
        figures = {"grad_norm": update.grad_norm, "loss": update.loss, **router_metrics(loads, ranks.data)}
        share = 1 - engine.config.betas[0]
        gradients = {name: (moment / share).contiguous() for name, moment in engine._state.export("exp_avg")}
        if ranks.is_replica_leader:
            save_file(logprobs, folder / f"logprobs_{ranks.data.rank}.safetensors")
        if ranks.is_rank0:
            save_file(gradients, folder / "gradients.safetensors")
            (folder / "found.json").write_text(json.dumps(figures))

    with_engine(model, {**SETTINGS, **settings}, learn, routing_replay=True)


def replay_with_sequence_parallelism(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """The same, tensor ranks sharing out the tokens between their matrices, and the experts."""
    with cpu_shim.sequence_parallelism(), cpu_layers.whole_experts():
        replay(folder, model, settings)


def replay_with_context_parallelism(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """The same with packed rows, cut over context ranks."""
    with cpu_layers.context_parallelism():
        replay(folder, model, settings)


def refused_replay(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """What a model is told that has nothing to replay."""
    try:
        with_engine(model, settings, lambda engine, ranks: None, routing_replay=True)
    except BadJob as error:
        (folder / "refusal").write_text(str(error))


def with_engine(
    model: str,
    settings: dict[str, Any],
    use: Callable[[MegatronEngine, Ranks], None],
    *,
    routing_replay: bool = False,
) -> None:
    config = TrainerConfig(**{"lr": 1e-3, "eps": 1e-4, **settings})
    ranks = Ranks.open(60, config.parallel.layout)
    try:
        use(MegatronEngine(model, config, ranks, routing_replay=routing_replay), ranks)
    finally:
        ranks.close()


def train_one(engine: MegatronEngine, ranks: Ranks, step: int) -> dict[str, Any]:
    groups = [[make_trajectory(f"train/{step}/{g}", m, step) for m in range(4)] for g in range(2)]
    ids = Batch(step, [[one.episode_id for one in group] for group in groups])
    share = share_of(ids, ranks.data.rank, ranks.data.world, 1)
    batch = make_step_batch(ids, share, [one for g in share for one in groups[g]], 0, engine.limits)
    learner = Learner(engine.config, engine, ranks.data)
    scored = learner.score(batch)
    return learner.update(batch, scored, learner.advantages(batch, scored))


def keep(path: Path, engine: MegatronEngine, ranks: Ranks) -> dict[str, torch.Tensor]:
    """All weights, on rank 0."""
    weights = {name: one.contiguous() for name, one in engine.weights(torch.float32)}
    if ranks.is_rank0:
        save_file(weights, path)
    return weights


def groups_of_their_own() -> Callable[[str], None]:
    """The next process group finds its peers under the given name: addresses of the one before are still there."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=host)
    original = dist.init_process_group

    def use(name: str) -> None:
        def init(backend: str, **settings: Any) -> None:
            original(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world, **settings)

        dist.init_process_group = init

    return use


def work(cases: Sequence[dict[str, Any]]) -> None:
    """All of them, as one rank."""
    plain = (run, run_with_sequence_parallelism, round_trip, first_steps, next_step, bad_step)
    replays = (replay, replay_with_sequence_parallelism, replay_with_context_parallelism, refused_replay)
    known = {one.__name__: one for one in (*plain, *replays)}
    name_group = groups_of_their_own()
    for number, given in enumerate(cases):
        print(f"rank {os.environ['RANK']}: {given}", file=sys.stderr, flush=True)
        name_group(f"case {number}")
        try:
            known[given["case"]](Path(given["folder"]), given["model"], given["settings"])
        except Exception:
            # What ranks print is mixed, and the others fail too once one has.
            Path(sys.argv[1]).with_name(f"failed_{os.environ['RANK']}").write_text(traceback.format_exc())
            raise


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    if "RANK" in os.environ:
        return work(cases)
    for count in sorted({case["ranks"] for case in cases}, reverse=True):  # two ranks go on where four have saved
        if become_ranks(count):
            die_with_parent()
            return work([case for case in cases if case["ranks"] == count])


if __name__ == "__main__":
    main()
