"""Ranks that start in slices beside ranks that load the model whole: start_ranks.py RANKS FOLDER CASES.

CASES is JSON: name → `model` and `config` of the trainer. Every rank compares its shards of policy, reference and
critic, buffers too, what they say of a pack and what they publish; it leaves a line per case in FOLDER/started_RANK.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from parallel_ranks import become_ranks, check_stream
from torch.distributed.tensor import DTensor
from trainer_support import one_pack

from penstock.trainer import BadJob, Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.mesh import mesh_of
from penstock.trainer.engines.fsdp.shell import NeedsWholeModel, open_shell


def whole_only(model: str) -> Any:
    raise NeedsWholeModel("for comparison")


def in_slices_only(model: str) -> Any:
    try:
        return open_shell(model)
    except NeedsWholeModel as error:
        raise AssertionError(str(error)) from error


def engine_of(case: Mapping[str, Any], ranks: Ranks, opening: Any) -> FSDPEngine:
    with patch("penstock.trainer.engines.fsdp.models.open_shell", opening):
        return FSDPEngine(case["model"], TrainerConfig(**case["config"]), ranks)


def tensors(engine: FSDPEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Of all models, as they lie on this rank."""
    parts: dict[str, Any] = {"policy": engine.policy, "reference": engine.reference, "critic": engine.critic}
    for part, owner in parts.items():
        module = getattr(owner, "module", owner)
        if module is not None:
            for name, one in (*module.named_parameters(), *module.named_buffers()):
                yield f"{part} {name}", one.to_local() if isinstance(one, DTensor) else one


def check_shards(engine: FSDPEngine, ranks: Ranks) -> None:
    """They are views of what FSDP holds on this rank, all of it once; every tensor of an expert is one rank's."""
    shards = engine.local_shards(torch.bfloat16)
    assert shards is not None
    model = engine.policy.model
    kept = [one for name, one in model.named_buffers() if name in model.state_dict() and not ranks.rank]
    held = [*kept, *(one.to_local() for one in model.parameters() if isinstance(one, DTensor))]
    filled = [shard.local for shard in shards if shard.local.numel()]
    assert {one.untyped_storage().data_ptr() for one in filled} <= {one.untyped_storage().data_ptr() for one in held}
    assert sum(one.numel() for one in filled) == sum(one.numel() for one in held)
    for shard in shards:
        assert shard.local.numel() * shard.published.itemsize == shard.rank_bytes[ranks.rank]
        assert sum(shard.rank_bytes) == torch.Size(shard.shape).numel() * shard.published.itemsize
        assert ".experts." not in shard.name or sorted(shard.rank_bytes)[:-1] == [0] * (ranks.world - 1), shard.name


def compare(case: Mapping[str, Any], ranks: Ranks, folder: Path) -> str:
    sliced, whole = (engine_of(case, ranks, opening) for opening in (in_slices_only, whole_only))
    expected = dict(tensors(whole))
    found = dict(tensors(sliced))
    if found.keys() != expected.keys():
        return f"other tensors: {sorted(found.keys() ^ expected.keys())[:3]}"
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            return f"{name} differs"
    packs = [one_pack(60, vocab=64)]
    said = [[engine.score(packs)[0], *_others(engine, packs)] for engine in (sliced, whole)]
    if not all(torch.equal(one, other) for one, other in zip(*said, strict=True)):
        return "its logprobs differ"
    weights = [dict(engine.weights(torch.float32)) for engine in (sliced, whole)]
    if sliced.adapter_settings is None and ranks.layout.tensor == 1:
        check_shards(sliced, ranks)
        check_stream(folder, sliced, ranks, weights[0])
    same = weights[0].keys() == weights[1].keys()
    return "ok" if same and all(torch.equal(weights[0][n], t) for n, t in weights[1].items()) else "its weights differ"


def _others(engine: FSDPEngine, packs: list[Any]) -> Iterator[torch.Tensor]:
    if engine.config.kl.needs_reference:
        yield engine.score_reference(packs)[0]
    if engine.has_critic:
        yield engine.values(packs)[0]


def refusal(case: Mapping[str, Any], ranks: Ranks, folder: Path) -> str:
    try:
        engine_of(case, ranks, in_slices_only)
    except BadJob as error:
        return str(error)
    return "it was taken"


def main(folder: Path, cases: Mapping[str, Any]) -> None:
    everyone = Ranks.open(120.0)
    lines = []
    try:
        for name, case in cases.items():
            layout = TrainerConfig(**case["config"]).parallel.layout
            ranks = Ranks(everyone.device, everyone.background, layout, everyone.timeout)
            lines.append(f"{name}: {(refusal if case.get('refused') else compare)(case, ranks, folder / name)}")
            ranks.own(mesh_of).close()
    finally:
        (folder / f"started_{everyone.rank}").write_text("\n".join(lines))
        everyone.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if become_ranks(int(sys.argv[1])):
        main(Path(sys.argv[2]), json.loads(sys.argv[3]))
