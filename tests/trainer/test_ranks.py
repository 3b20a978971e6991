"""Several ranks on gloo give what one rank gives; checkpoints are read by another number of ranks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from trainer_support import make_job  # noqa: E402

from penstock.trainer.checkpoint import CheckpointStore, load  # noqa: E402
from penstock.trainer.config import TrainerConfig  # noqa: E402
from penstock.trainer.engine import FSDPEngine  # noqa: E402
from penstock.trainer.loop import train  # noqa: E402
from penstock.trainer.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent


def torchrun(folder: Path, model: str, settings: dict[str, Any], ranks: int = 2) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = [str(HERE / "two_ranks.py"), str(folder), model, json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run(
        [*command, *program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


EVERYTHING = {
    "advantage": "gae",
    "critic": {"lr": 1e-3},
    "kl": {"in_reward": 0.05, "in_loss": 0.01, "target": 0.5},
    "loss": "kl_cov",
    "loss_options": {"share": 0.1},
    "aggregation": "episode_mean",
    "entropy_bonus": 0.01,
    "filter": "pf_ppo",
    "filter_options": {"mode": "max_random"},
}
"""All that sums over ranks: whitening, choices, KL per episode, counts of tokens and episodes."""


@pytest.mark.parametrize("algorithm", [{}, EVERYTHING], ids=["default", "everything"])
def test_two_ranks_give_one_ranks_results(algorithm: dict[str, Any], tmp_path: Path, tiny_model: str) -> None:
    settings = {"steps": 4, "minibatches": 2, "micro_batch_tokens": 48, **algorithm}
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    asyncio.run(train(make_job(one, tiny_model, settings)))
    torchrun(two, tiny_model, settings)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a.get("value_loss", 0.0) == pytest.approx(b.get("value_loss", 0.0), rel=1e-4)
        assert a.get("kl_coefficient", 0.0) == pytest.approx(b.get("kl_coefficient", 0.0), rel=1e-6)
        for exact in ("reward", "tokens", "tokens_trained", "staleness_tokens", "episode/tool_calls", "updates"):
            assert a[exact] == b[exact], exact
    expected = load_file(one / "run" / "final_model" / "model.safetensors")
    found = load_file(two / "run" / "final_model" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0)
    check_one_rank_reads(two, tiny_model, found, TrainerConfig(**algorithm))


def check_one_rank_reads(folder: Path, model: str, expected: dict[str, torch.Tensor], config: TrainerConfig) -> None:
    """A checkpoint of two ranks, in one: the same weights to the bit, and the optimizer's moments."""
    checkpoint = CheckpointStore(folder / "run" / "checkpoints", keep=2).newest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.ranks) == (4, 2)
    ranks = Ranks.open(timeout_s=30)
    try:
        engine = FSDPEngine(model, config, ranks)
        load(engine, ranks, checkpoint)
        restored = dict(engine.weights(torch.float32))
    finally:
        ranks.close()
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items())
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert steps == {8}, "two updates in each of four steps"


def test_collectives_of_one(ranks: Ranks) -> None:
    assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
    assert ranks.gather({"a": 1.5}) == [{"a": 1.5}]
    assert ranks.from_first([1, None]) == [1, None]
    assert ranks.any(True)
    assert not ranks.any(False)
