"""Ranks that share out a mixture's experts: expert_ranks.py RANKS FOLDER CASES.

CASES is JSON: name → `model`, `config` of the trainer, `steps`, `replay` (packs name the experts), and `resume`,
the case whose checkpoint is loaded. Each rank leaves the logprobs of its rows before the first step and the bytes that
its tokens' rows travelled with in that step; rank 0 the gradients of that step and the weights after the last, under
the parameters' names and, merged, under those of the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory_ranks import exchanged_bytes
from parallel_ranks import become_ranks, check_stream
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_support import newest

from penstock.rollout_server import Mixtures
from penstock.trainer import ModelLimits, Ranks, TrainerConfig, make_row
from penstock.trainer.batch import Row
from penstock.trainer.config import adam_settings
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.mesh import mesh_of
from penstock.trainer.packing import Pack, pack_rows
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import DataCursor, Segment

LENGTHS = (23, 9, 31, 17, 12)
"""Tokens of the rows: fewer than four ranks have two of each."""
PROMPT, FORK, VOCAB = 4, 20, 64
PER_TOKEN = 2
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "micro_batch_tokens": 48, "max_grad_norm": 0.5}


def rows_of(step: int) -> list[list[int]]:
    """The ids of each row; of the first one they are equal, so that all its tokens take the same experts. The third
    continues it from its `FORK`th token, the last one from an earlier one."""
    rng = np.random.default_rng(step)
    rows = [[5] * LENGTHS[0], *(rng.integers(1, VOCAB, length).tolist() for length in LENGTHS[1:])]
    rows[2][:FORK], rows[4][:PROMPT] = rows[0][:FORK], rows[0][:PROMPT]
    return rows


def routes_of(ids: list[int], mixtures: Mixtures) -> np.ndarray:
    """[L, layers, k], other experts for each token and layer, the same for rows that begin alike; of the first token
    they are unknown."""
    rng = np.random.default_rng(ids[0])
    layers, per_token = range(mixtures.layers), mixtures.per_token
    routes = [[rng.permutation(mixtures.experts)[:per_token] for _ in layers] for _ in ids]
    routes[0] = [np.zeros(per_token) for _ in layers]
    return np.array(routes, np.uint8)


def trained_tokens() -> int:
    return sum(LENGTHS) - PROMPT * len(LENGTHS)


def make(ids: list[int]) -> Row:
    response = len(ids) - PROMPT
    segment = Segment(
        prompt_ids=np.array(ids[:PROMPT], np.int32),
        response_ids=np.array(ids[PROMPT:], np.int32),
        response_mask=np.ones(response, np.uint8),
        response_logprobs=np.full(response, -3.0, np.float32),
        version_spans=np.array([[0, 0, response]], np.int32),
        turn_starts=np.array([0], np.int32),
    )
    return make_row(0, segment, "", step=0, bound=0, model=ModelLimits(context=256, vocab=VOCAB))


def packs_of(step: int, engine: FSDPEngine, ranks: Ranks) -> list[Pack]:
    rows = [make(ids) for ids in rows_of(step)[ranks.data.rank :: ranks.data.world]]
    if (mixtures := engine.limits.mixtures) is not None:
        rows = [replace(row, experts=routes_of(row.ids.tolist(), mixtures)) for row in rows]
    return pack_rows(rows, 48, share=engine.shares_prefixes, layout=engine.row_layout)


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().contiguous().clone()


def run(everyone: Ranks, folder: Path, name: str, case: Mapping[str, Any]) -> None:
    config = TrainerConfig(**{**SETTINGS, **case["config"]})
    ranks = Ranks(everyone.device, everyone.background, config.parallel.layout, everyone.timeout)
    engine = FSDPEngine(case["model"], config, ranks, routing_replay=case.get("replay", False))
    own = folder / name
    own.mkdir(exist_ok=True)
    store, first = CheckpointStore(own / "checkpoints", keep=2), 0
    if ranks.is_rank0:
        store.open()
    if saver := case.get("resume"):
        info = newest(CheckpointStore(folder / saver / "checkpoints", keep=2))
        engine.load(info.path, info.ranks)
        first = info.step
    else:
        check_names(Path(case["model"]), engine, ranks)
    packs = packs_of(first, engine, ranks)
    computed = sum(len(pack.ids) for pack in packs)
    scored = [values.tolist() for values in engine.score(packs)]
    gradients: dict[str, Tensor] = {}
    norms, exchanged, learned = [], [], 0
    for step in range(first, first + case["steps"]):
        packs = packs_of(step, engine, ranks)
        learned += sum(len(pack.ids) for pack in packs)
        with exchanged_bytes() as counted:
            loss = engine.accumulate(packs, lambda _, outputs: -outputs.logprobs.sum(), trained_tokens())
        exchanged.append(sum(counted))
        learning = {name: one.grad for name, one in engine.policy.model.named_parameters()}
        gradients = gradients or {name: whole(one) for name, one in learning.items() if one is not None}
        norms.append([loss, engine.step(adam_settings(config, config.lr), loss).grad_norm])
    weights = {name: whole(one) for name, one in engine.policy.model.named_parameters()}
    engine.begin_save(store.unfinished(first + case["steps"])).result(timeout=300)
    published = {n: t.contiguous() for n, t in engine.weights(torch.float32)}
    if engine.adapter_settings is None:
        check_stream(own, engine, ranks, published)
    report = {"scored": scored if ranks.is_replica_leader else [], "exchanged": exchanged[0], "computed": computed}
    loads = engine.take_router_loads()
    report |= {"learned": learned, "routed": [] if loads is None else [float(one.tokens[0]) for one in loads.layers]}
    (own / f"rank_{ranks.rank}.json").write_text(json.dumps(report))
    if ranks.is_rank0:
        store.seal(first + case["steps"], DataCursor(), ranks.world, {})
        save_file(gradients, own / "gradients.safetensors")
        save_file(weights, own / "weights.safetensors")
        save_file(published, own / "published.safetensors")
        (own / "norms.json").write_text(json.dumps(norms))
    ranks.own(mesh_of).close()


def check_names(model: Path, engine: FSDPEngine, ranks: Ranks) -> None:
    """Assert that the weights before the first step have the names and bits of the model's files."""
    published = dict(engine.weights(torch.float32))
    if ranks.is_rank0:
        files = load_file(model / "model.safetensors")
        assert published.keys() == files.keys()
        assert all(torch.equal(published[name], tensor) for name, tensor in files.items())


def main(folder: Path, cases: Mapping[str, Any]) -> None:
    everyone = Ranks.open(120.0)
    try:
        for name, case in cases.items():
            run(everyone, folder, name, case)
    finally:
        everyone.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if become_ranks(int(sys.argv[1])):
        main(Path(sys.argv[2]), json.loads(sys.argv[3]))
