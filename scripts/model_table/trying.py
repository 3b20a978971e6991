"""What the engine fsdp makes of a tiny model: the cells of the table that cost a second of one CPU thread.

trains      logprobs and gradients of a pack in float32 against those of each row alone in float64, by transformers'
            `eager` attention and experts
publishes   names, shapes and values against the model's files, and the names against those on the hub
LoRA        one update of low-rank matrices alone, and the names of what they are merged into
experts     whether two ranks may share out the experts of a layer
context     whether two ranks may share out the tokens of a pack
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scripts.model_table.families import FAMILIES, Family
from scripts.model_table.page import CHEAP, UNKNOWN
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, Pack, Ranks, TrainerConfig
from penstock.trainer.batch import Row, number_tokens
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.experts import experts_of
from penstock.trainer.engines.fsdp.rows import RowPlan
from penstock.trainer.engines.fsdp.sharded import check_context
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel
from penstock.trainer.packing import RowLayout, join_rows
from penstock.trainer.ranks.layout import RankLayout

SAME = 2e-4
"""Largest difference of a logprob, and of a gradient over the largest of its parameter or 1: ten times what float32
makes of the families on the slowest kernels of a CPU. Rows that reach each other differ by much more."""
LENGTHS = (37, 5, 70, 41, 23)
ACCEPTED = "yes"


def try_families(models: Path) -> dict[str, dict[str, str]]:
    """The cells of all families by name. Each is left in a folder of `models` that has this name."""
    ranks = Ranks.open(timeout_s=60)
    try:
        return {family.name: try_family(family, models / family.name, ranks) for family in FAMILIES}
    finally:
        ranks.close()


def try_family(family: Family, folder: Path, ranks: Ranks) -> dict[str, str]:
    """The cells by column. `folder` then holds the model, and in ``published`` what an engine would load after one
    update."""
    model = family.save(folder)
    try:
        engine = FSDPEngine(model, TrainerConfig(lr=1e-3), ranks)
    except BadJob as error:
        return {"trains": f"refused: {error}", **dict.fromkeys(CHEAP[1:], UNKNOWN)}
    return {
        "trains": _trains(engine, model),
        "publishes": _publishes(engine, family, folder),
        "lora": _lora(model, ranks),
        "experts": _experts(engine),
        "context": _context(engine),
    }


def tiny_rows() -> list[Row]:
    rng = np.random.default_rng(1)
    return number_tokens([_row(rng, length) for length in LENGTHS])


def _row(rng: np.random.Generator, length: int) -> Row:
    """Its second half is sampled."""
    targets = np.arange(max(1, length // 2), length)
    zeros, ones = np.zeros(len(targets), dtype=np.int64), np.ones(len(targets), dtype=np.bool_)
    ids = rng.integers(1, 60, length)
    return Row(0, ids, targets, zeros.astype(np.float32), zeros, ones, ones, zeros)


def gaps(policy: Any, model: str) -> tuple[float, float]:
    """(of logprobs, of gradients) between a pack and its rows alone. `policy`: pack → `Outputs`, also sharded."""
    rows = tiny_rows()
    policy.zero_grad()
    packed = policy(join_rows(rows)).logprobs
    packed.sum().backward()
    alone, gradients = _alone(model, rows)
    of_logprobs = float((packed.detach() - alone).abs().max())
    found = {name: _whole(one.grad).double() for name, one in policy.model.named_parameters() if one.grad is not None}
    policy.zero_grad()
    if found.keys() != gradients.keys():
        return of_logprobs, float("inf")
    return of_logprobs, max(_gap(found[name], gradients[name]) for name in found)


def _alone(model: str, rows: list[Row]) -> tuple[Tensor, Mapping[str, Tensor]]:
    exact = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(model, **exact).eval()
    found = []
    for row in rows:
        ids, targets = torch.from_numpy(row.ids), torch.from_numpy(row.targets)
        logprobs = loaded(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        of_row = logprobs[targets - 1, ids[targets]]
        of_row.sum().backward()
        found.append(of_row.detach())
    return torch.cat(found), {name: one.grad for name, one in loaded.named_parameters() if one.grad is not None}


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def _trains(engine: FSDPEngine, model: str) -> str:
    of_logprobs, of_gradients = gaps(engine.policy, model)
    if not (of_logprobs <= SAME and of_gradients <= SAME):
        return f"WRONG: logprobs differ by {of_logprobs:.0e}, gradients by {of_gradients:.0e}"
    return described(engine.policy.rows)


def described(rows: RowPlan) -> str:
    if rows.unpacked_because:
        return f"{'padded' if rows.layout is RowLayout.PADDED else 'one by one'}: {rows.unpacked_because}"
    return f"row by row: `{rows.mixers}`" if rows.row_by_row else "packed"


def _publishes(engine: FSDPEngine, family: Family, folder: Path) -> str:
    stored = load_file(folder / "model.safetensors")
    loaded = dict(engine.weights(torch.float32))
    if loaded.keys() != stored.keys():
        return f"WRONG: {min(loaded.keys() ^ stored.keys())} is in one of files and version alone"
    if changed := [name for name in stored if not torch.equal(stored[name], loaded[name])]:
        return f"WRONG: {changed[0]} is not what was read"
    if lacking := set(family.names) - loaded.keys():
        return f"WRONG: the hub has {min(lacking)}"
    _update(engine)
    published = dict(engine.weights(torch.float32))
    if published.keys() != stored.keys() or all(torch.equal(stored[name], published[name]) for name in stored):
        return "WRONG: an update changes nothing"
    engine.save_model(folder / "published")
    return ACCEPTED


def _update(engine: FSDPEngine) -> None:
    def loss(pack: Pack, outputs: Any) -> Tensor:
        total: Tensor = -outputs.logprobs.sum()
        return total

    assert not engine.update([join_rows(tiny_rows())], loss, 100.0, 0).skipped


def _lora(model: str, ranks: Ranks) -> str:
    try:
        engine = FSDPEngine(model, TrainerConfig.model_validate({"lr": 1e-2, "lora": {"rank": 2}}), ranks)
    except (BadJob, ValueError) as error:
        return f"refused: {error}"
    before = {name: tensor.clone() for name, tensor in engine.weights(torch.float32)}
    _update(engine)
    after = dict(engine.weights(torch.float32))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    targets = {name.removesuffix(".lora_A.weight") for name, _ in engine.adapter_weights() if ".lora_A." in name}
    if not changed or len(changed) > len(targets):
        return f"WRONG: {len(changed)} tensors of {len(targets)} change"
    left_out = _left_out(engine, targets)
    return f"not all: {left_out}" if left_out else "all"


def _left_out(engine: FSDPEngine, targets: set[str]) -> str:
    """Return the modules, other than the output head, that get no low-rank matrices, as text."""
    model = engine.policy.model
    head = model.get_output_embeddings()
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}
    reached = {name.rpartition(".")[2] for name in targets}
    own = {name.removesuffix(".base_layer").rpartition(".")[2] for name in linear if ".lora_" not in name}
    experts = ["the experts"] * any("experts" in name for name, _ in model.named_parameters())
    return ", ".join([*experts, *(f"`{name}`" for name in sorted(own - reached))])


def _experts(engine: FSDPEngine) -> str:
    if not any("experts" in name for name, _ in engine.policy.model.named_parameters()):
        return "none"
    try:
        experts_of(engine.policy.model, 2)
    except CannotSplitModel as error:
        return f"refused: {error}"
    return ACCEPTED


def _context(engine: FSDPEngine) -> str:
    try:
        check_context(engine.policy, RankLayout(context=2))
    except CannotSplitModel as error:
        return f"refused: {error}"
    return ACCEPTED
