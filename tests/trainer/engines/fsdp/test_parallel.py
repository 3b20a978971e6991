"""Tensor and context parallelism over gloo give what one process gives; checkpoints fit any layout of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import parallel_ranks
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from torch.distributed.checkpoint import FileSystemReader
from trainer_support import run_ranks, threads_of_gloo

from penstock.trainer import Ranks
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel, plan_of

pytestmark = pytest.mark.torch
CRITIC = {
    **{"advantage": "gae", "critic": {"lr": 1e-2}, "entropy_bonus": 0.01, "kl": {"in_loss": 0.01}},
    "distill": {"in_loss": 0.5},
}
LORA = {"lora": {"rank": 4}, "kl": {"in_loss": 0.01}}
FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FSDP": ({}, {}),
    "CP x TP, everything": ({"context": 2, "tensor": 2}, CRITIC),
    "HSDP": ({"replicate": 2}, {"activation_offload": True}),
    "HSDP, everything": ({"replicate": 2}, CRITIC),
    "HSDP, one shard each": ({"replicate": 4}, {}),
    "HSDP, LoRA": ({"replicate": 2}, LORA),
    "HSDP, offloaded": ({"replicate": 2}, {"offload": True, "recompute": True}),
    "FSDP x TP": ({"tensor": 2}, {}),
    "FSDP x CP, everything": ({"context": 2}, CRITIC),
    "FSDP, offloaded": ({}, {"offload": True}),
    "FSDP x TP, offloaded": ({"tensor": 2}, {"offload": True}),
    "HSDP, moments on the host": ({"replicate": 2}, {"offload": "optimizer"}),
    "FSDP x TP, activations on the host": ({"tensor": 2}, {"activation_offload": True}),
    "FSDP x CP, inputs on the host": ({"context": 2}, {"activation_offload": True, "recompute": True}),
    "HSDP x CP": ({"replicate": 2, "context": 2}, {}),
    "HSDP x TP": ({"replicate": 2, "tensor": 2}, {}),
}
TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FSDP, everything": ({}, CRITIC),
    "TP, LoRA": ({"tensor": 2}, LORA),
    "CP": ({"context": 2}, {}),
}
"""By number of ranks: layout, other settings."""
RESUMED = "one saved, TP goes on"
GOING_ON: dict[str, tuple[str, dict[str, int]]] = {
    "two replicas go on": ("HSDP", {"replicate": 2}),
    "one replica goes on": ("HSDP", {}),
    "four replicas go on": ("HSDP", {"replicate": 4}),
    "two replicas go on where four saved": ("HSDP, one shard each", {"replicate": 2}),
}
"""Who saved, and who goes on."""


def launch(folder: Path, model: str, ranks: int, cases: dict[str, Any]) -> Path:
    run_ranks("parallel_ranks.py", ranks, folder, model, json.dumps(cases))
    return folder


def cases_of(layouts: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    return {
        name: {"config": {**config, "parallel": parallel}, "steps": 2} for name, (parallel, config) in layouts.items()
    }


def metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"metrics_{step}.json").read_text())
    return found


def assert_same(one: Path, other: Path, step: int) -> None:
    """Losses, gradient norms and all weights after `step` steps."""
    for a, b in zip(metrics(one, step), metrics(other, step), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-6)
        for close in ("grad_norm", "entropy", "value_loss", "kl_reference", "teacher_divergence", "student_top_mass"):
            assert b.get(close, 0.0) == pytest.approx(a.get(close, 0.0), rel=1e-4, abs=1e-7), close
        for exact in ("tokens", "tokens_trained", "reward", "updates"):
            assert a[exact] == b[exact], exact
    expected, found = (load_file(folder / f"weights_{step}.safetensors") for folder in (one, other))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, Path]:
    """What one process gives: two steps of each kind of training, and the plain one's third from its checkpoint."""
    cases = [{"config": config, "steps": 2} for config in ({}, CRITIC, LORA)]
    folders = {str(case["config"]): tmp_path_factory.mktemp("alone") for case in cases}
    ranks, threads = Ranks.open(timeout_s=30), torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        for case in cases:
            parallel_ranks.run(ranks, folders[str(case["config"])], tiny_model, case)
        parallel_ranks.run(ranks, folders["{}"], tiny_model, {"config": {}, "steps": 1, "resume": True})
    finally:
        torch.set_num_threads(threads)
        ranks.close()
    return folders


@pytest.fixture(scope="module")
def four(alone: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    folder = tmp_path_factory.mktemp("four")
    launch(folder, tiny_model, 4, cases_of(FOUR))
    resumed = {}
    for name, (saved, parallel) in GOING_ON.items():
        copy_checkpoint(folder / saved, folder / name)
        resumed[name] = {"config": {"parallel": parallel}, "steps": 1, "resume": True}
    return launch(folder, tiny_model, 4, resumed)


@pytest.fixture(scope="module")
def two(alone: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    folder = tmp_path_factory.mktemp("two")
    copy_checkpoint(alone["{}"], folder / RESUMED)
    resumed = {"config": {"parallel": {"tensor": 2}}, "steps": 1, "resume": True}
    return launch(folder, tiny_model, 2, {**cases_of(TWO), RESUMED: resumed})


def without_memory_settings(config: dict[str, Any]) -> str:
    """Which run of `alone` has the same numbers."""
    memory = {"offload", "activation_offload", "recompute"}
    return str({name: value for name, value in config.items() if name not in memory})


def copy_checkpoint(run: Path, other: Path) -> None:
    """That of step 2."""
    shutil.copytree(run / "checkpoints" / "step_00000002", other / "checkpoints" / "step_00000002")


@pytest.mark.deep
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_give_one_process_results(layout: str, alone: dict[str, Path], four: Path) -> None:
    assert_same(alone[without_memory_settings(FOUR[layout][1])], four / layout, 2)


@pytest.mark.deep
def test_a_checkpoint_holds_each_shard_once_and_goes_on_with_other_replicas(alone: dict[str, Path], four: Path) -> None:
    for resumed in GOING_ON:
        assert_same(alone["{}"], four / resumed, 3)
    for name, shards in (("HSDP", 2), ("HSDP, one shard each", 1)):
        saved = four / name / "checkpoints" / "step_00000002"
        metadata = FileSystemReader(saved).read_metadata()
        (key,) = (one for one in metadata.state_dict_metadata if one.endswith("model.layers.0.mlp.up_proj.weight"))
        assert len(metadata.state_dict_metadata[key].chunks) == shards
        written = sum(file.stat().st_size for file in saved.glob("*.distcp"))
        assert written == sum(part.length for part in metadata.storage_data.values()), "something was written twice"


@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_give_one_process_results(layout: str, alone: dict[str, Path], two: Path) -> None:
    _, config = TWO[layout]
    assert_same(alone[str(config)], two / layout, 2)


def test_the_loss_has_the_same_bits_with_other_rows_on_other_ranks_in_other_packs(
    alone: dict[str, Path], two: Path
) -> None:
    layout, (_, config) = "FSDP, everything", TWO["FSDP, everything"]
    assert metrics(two / layout, 2)[0]["loss"] == metrics(alone[str(config)], 2)[0]["loss"]


def test_split_matrices_go_on_where_one_process_saved(alone: dict[str, Path], two: Path) -> None:
    assert_same(alone["{}"], two / RESUMED, 3)


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["FSDP", "FSDP x TP"])
def test_one_process_goes_on_where_four_ranks_saved(
    layout: str,
    alone: dict[str, Path],
    four: Path,
    tmp_path: Path,
    tiny_model: str,
    ranks: Ranks,
) -> None:
    copy_checkpoint(four / layout, tmp_path)
    parallel_ranks.run(ranks, tmp_path, tiny_model, {"config": {}, "steps": 1, "resume": True})
    assert_same(alone["{}"], tmp_path, 3)


def test_what_is_silently_wrong_over_gloo_is_right(two: Path) -> None:
    lines = [line for rank in range(2) for line in (two / f"checked_{rank}").read_text().splitlines()]
    assert len(lines) == 14
    assert not [line for line in lines if not line.endswith("ok")]


def test_no_thread_of_gloo_outlives_its_groups(two: Path) -> None:
    assert not threads_of_gloo(two), "one of them could abort the ending interpreter"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Qwen3", {"num_key_value_heads": 1}, r"num_key_value_heads is 1, which trainer\.parallel\.tensor=2 does not"),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16}, "asks for moe_tp_experts, which the trainer"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, kind, **changes))
    with pytest.raises(CannotSplitModel, match=message):
        plan_of(model, 2)
