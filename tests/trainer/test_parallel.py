"""Tensor and context parallelism over gloo give what one process gives; checkpoints fit any layout of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from test_ranks import torchrun  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402
from trainer_support import make_job  # noqa: E402

from penstock.trainer.job import BadJob, check_job  # noqa: E402
from penstock.trainer.tensor_parallel import CannotSplit, plan_of  # noqa: E402

pytestmark = pytest.mark.torch
CRITIC = {"advantage": "gae", "critic": {"lr": 1e-2}, "entropy_bonus": 0.01, "kl": {"in_loss": 0.01}}
LORA = {"lora": {"rank": 4}, "kl": {"in_loss": 0.01}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (4, {}, {}),
    "FSDP x TP": (4, {"tensor": 2}, {}),
    "FSDP x CP, everything": (4, {"context": 2}, CRITIC),
    "CP x TP, everything": (4, {"context": 2, "tensor": 2}, CRITIC),
    "TP, LoRA": (2, {"tensor": 2}, LORA),
}


def run(folder: Path, model: str, settings: dict[str, Any], ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    torchrun(folder, model, settings, ranks=ranks, name="parallel_ranks.py")


def metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"metrics_{step}.json").read_text())
    return found


def assert_same(one: Path, other: Path, step: int) -> None:
    """Losses, gradient norms and all weights after `step` steps."""
    for a, b in zip(metrics(one, step), metrics(other, step), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-6)
        for close in ("grad_norm", "entropy", "value_loss", "kl_reference"):
            assert b.get(close, 0.0) == pytest.approx(a.get(close, 0.0), rel=1e-4, abs=1e-7), close
        for exact in ("tokens", "tokens_trained", "reward", "updates"):
            assert a[exact] == b[exact], exact
    expected, found = (load_file(folder / f"weights_{step}.safetensors") for folder in (one, other))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, Path]:
    """What one process gives: two steps of each kind of training, three of the plain one."""
    folders = {}
    for name, config in {"{}": {}, str(CRITIC): CRITIC, str(LORA): LORA}.items():
        folders[name] = tmp_path_factory.mktemp("alone")
        run(folders[name], tiny_model, {"config": config, "steps": 2}, 1)
    plain = folders["{}"]
    run(plain, tiny_model, {"config": {}, "steps": 1, "resume": True}, 1)
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_one_process_results(
    layout: str, alone: dict[str, Path], tmp_path: Path, tiny_model: str
) -> None:
    ranks, parallel, config = LAYOUTS[layout]
    run(tmp_path, tiny_model, {"config": {**config, "parallel": parallel}, "steps": 2}, ranks)
    assert_same(alone[str(config)], tmp_path, 2)
    if not parallel:
        first = [metrics(folder, 2)[0]["loss"] for folder in (alone[str(config)], tmp_path)]
        assert first[0] == first[1], "to the bit: other rows on other ranks, in other packs"


def test_another_layout_goes_on_where_a_checkpoint_stands(
    alone: dict[str, Path], tmp_path: Path, tiny_model: str
) -> None:
    """One process saved after two steps; two ranks with split matrices train the third, one process the fourth."""
    one = alone["{}"]
    shutil.copytree(one / "checkpoints" / "step_00000002", tmp_path / "checkpoints" / "step_00000002")
    run(tmp_path, tiny_model, {"config": {"parallel": {"tensor": 2}}, "steps": 1, "resume": True}, 2)
    assert_same(one, tmp_path, 3)


def test_what_is_silently_wrong_over_gloo_is_right(tmp_path: Path, tiny_model: str) -> None:
    torchrun(tmp_path, tiny_model, "", name="two_ranks_traps.py")
    lines = [line for rank in range(2) for line in (tmp_path / f"checked_{rank}").read_text().splitlines()]
    assert len(lines) == 14
    assert not [line for line in lines if not line.endswith("ok")]


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
    with pytest.raises(CannotSplit, match=message):
        plan_of(model, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "parallel": {"tensor": 2}}, r"trainer\.ranks is 3; one copy of the model takes 2"),
        ({"ranks": 2, "parallel": {"pipeline": 2}}, r"fsdp has no trainer\.parallel\.pipeline"),
        ({"ranks": 12, "parallel": {"tensor": 2, "context": 2}}, "groups_per_step only 2"),
        ({"ranks": 2, "parallel": {"tensor": 2}, "compile": True}, r"trainer\.compile does not go with"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_loaded(
    tmp_path: Path, tiny_model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadJob, match=message):
        check_job(make_job(tmp_path, tiny_model, settings))
