"""Each rank reads its own slices of the files: the model is the one that is loaded whole, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file
from tests.tiny_model import save_tiny_model
from trainer_support import run_ranks
from transformers import AutoModelForCausalLM

from penstock.trainer import BadJob, Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.shell import NeedsWholeModel, open_shell

pytestmark = pytest.mark.torch
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EVERYTHING = {"advantage": "gae", "kl": {"in_loss": 0.01}}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied, critic, reference": ("Qwen3", {"tie_word_embeddings": True}, EVERYTHING),
    "untied, of odd sizes": ("Qwen3", {"vocab_size": 67, "intermediate_size": 61, "tie_word_embeddings": False}, {}),
    "capped": ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}, {}),
    "stacked experts": ("Qwen3Moe", MIXTURE, EVERYTHING),
    "other names": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, {}),
    "a buffer in the files": ("Glm4Moe", {**GROUPS, "first_k_dense_replace": 1}, {}),
    "scaled frequencies": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
        {},
    ),
    "low rank": ("Qwen3", {"tie_word_embeddings": True}, {"lora": {"rank": 4}, "kl": {"in_loss": 0.01}}),
    "low rank beside experts": ("Qwen3Moe", MIXTURE, {"lora": {"rank": 4}}),
}  # fmt: skip
"""Kind, changes of its configuration, settings of the trainer."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, changes, config) in KINDS.items():
        found[name] = {"model": save_tiny_model(tmp_path_factory.mktemp("model"), kind, **changes), "config": config}
    several = tmp_path_factory.mktemp("several")
    model = AutoModelForCausalLM.from_pretrained(found["stacked experts"]["model"])
    model.save_pretrained(several, max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 3
    half = tmp_path_factory.mktemp("half")
    model.to(torch.bfloat16).save_pretrained(half)
    bfloat16 = {"dtype": "bfloat16"}
    found["several files"] = {"model": str(several), "config": {}}
    found["half precision"] = {"model": str(half), "config": bfloat16}
    found["a base in half precision"] = {"model": str(half), "config": {**bfloat16, "lora": {"rank": 4}}}
    found["offloaded"] = {"model": str(several), "config": {"offload": True}}
    found["NaN"] = {"model": poisoned(tmp_path_factory.mktemp("nan")), "config": {}, "refused": True}
    return found


def poisoned(folder: Path) -> str:
    """In the last rows, which the last rank reads."""
    model = save_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


SPLIT = {
    "FSDP x TP": ("tied, critic, reference", {"parallel": {"tensor": 2}}),
    "FSDP x TP, low rank": ("low rank", {"parallel": {"tensor": 2}}),
    "experts over ranks": ("stacked experts", {"parallel": {"expert": 2}}),
}


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.deep) for count in (1, 4))])
def test_every_rank_has_what_loading_whole_gives(count: int, cases: dict[str, Any], tmp_path: Path) -> None:
    every = dict(cases)
    if count > 1:
        for name, (base, config) in SPLIT.items():
            every[name] = {**cases[base], "config": {**cases[base]["config"], **config}}
    run_ranks("start_ranks.py", count, tmp_path, json.dumps(every))
    said = [(tmp_path / f"started_{rank}").read_text().splitlines() for rank in range(count)]
    for name, line in zip(every, zip(*said, strict=True), strict=False):
        if name == "NaN":
            assert "NaN" in line[0]
            assert "model.layers.1.mlp.up_proj.weight" in line[0]
            assert len(set(line)) == 1, "all ranks are refused, with one cause"
        else:
            assert line == (f"{name}: ok",) * count
    assert len(said[0]) == len(every)


def change_files(folder: Path, change: Any) -> str:
    model = save_tiny_model(folder, "Qwen3Moe", **MIXTURE)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"),
            r"lack model\.layers\.0\.self_attn\.k_proj\.weight",
        ),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"mlp\.experts"),
        (lambda t: t.update(stray=torch.zeros(2)), "have stray: which belong to no parameter"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"model\.norm\.weight has shape \[31\] in the files, the model's is \[32\]",
        ),
    ],
)
def test_files_that_are_not_the_models_are_refused_by_name(
    change: Any, message: str, tmp_path: Path, ranks: Ranks
) -> None:
    with pytest.raises(BadJob, match=message):
        FSDPEngine(change_files(tmp_path, change), TrainerConfig(), ranks)


def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path: Path, ranks: Ranks) -> None:
    model = save_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadJob, match=r"model\.safetensors"):
        FSDPEngine(model, TrainerConfig(), ranks)


def test_what_cannot_be_read_in_slices_is_loaded_whole(tmp_path: Path, ranks: Ranks) -> None:
    model = save_tiny_model(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    (tmp_path / "pickled").mkdir()
    loaded.config.save_pretrained(tmp_path / "pickled")
    torch.save(loaded.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(NeedsWholeModel, match="no safetensors"):
        open_shell(str(tmp_path / "pickled"))
    engine = FSDPEngine(str(tmp_path / "pickled"), TrainerConfig(), ranks)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.weights(torch.float32))
