"""A checkpoint as a Hugging Face folder, by the command; the folder as the start of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from trainer_support import make_job, one_pack
from transformers import AutoTokenizer

from penstock.deploy import (
    RunConfig,
    app,
    dump_config,
)
from penstock.trainer import Ranks, TrainerConfig, train
from penstock.trainer.engines.fsdp import FSDPEngine

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}], ids=["whole model", "lora"])
async def test_a_checkpoint_becomes_a_folder_that_a_run_starts_from(
    settings: dict[str, Any], tmp_path: Path, tiny_model: str
) -> None:
    job = make_job(tmp_path, tiny_model, {"steps": 4, **settings})
    await train(job)
    config = RunConfig(model=tiny_model, data=job.data, trainer=job.config)
    (job.run_dir / "config.yaml").write_text(dump_config(config))
    newest, older = tmp_path / "newest", tmp_path / "older"
    for arguments in ([str(newest)], [str(older), "--step", "2"]):
        done = CliRunner().invoke(app, ["train", "export", str(job.run_dir), *arguments])
        assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, ["train", "export", str(job.run_dir), str(newest), "--step", "2"])
    assert again.exit_code == 2, "what is in a folder is not thrown away"
    assert "is there already" in again.output
    final = load_file(job.run_dir / "final_model" / "model.safetensors")
    exported = load_file(newest / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in final.items())
    before = load_file(older / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in final.items())
    for folder in (newest, job.run_dir / "final_model"):
        modes = {file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}
        assert len(modes) == 1, "settings and weights have the same permissions"
    assert AutoTokenizer.from_pretrained(newest).vocab_size == 64
    assert logprobs(newest) == logprobs(job.run_dir / "final_model")


def logprobs(model: Path) -> list[float]:
    ranks = Ranks.open(timeout_s=30)
    try:
        (found,) = FSDPEngine(str(model), TrainerConfig(), ranks).score([one_pack(60, vocab=64)])
    finally:
        ranks.close()
    return [float(one) for one in found]


def test_a_step_that_is_not_there_is_said(tmp_path: Path, tiny_model: str) -> None:
    config = RunConfig(model=tiny_model, data={"train": "rows.jsonl"})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    done = CliRunner().invoke(app, ["train", "export", str(tmp_path), str(tmp_path / "out"), "--step", "4"])
    assert done.exit_code == 2
    assert "has no checkpoint of step 4; there: 2" in done.output
    done = CliRunner().invoke(app, ["train", "export", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code == 2, "a folder that is no whole checkpoint"
    assert "complete" in done.output
