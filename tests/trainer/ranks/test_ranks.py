"""Several ranks on gloo give what one rank gives; checkpoints are read by another number of ranks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from scripts.model_table.families import FAMILIES
from tests.tiny_model import save_poisoned_model as poisoned
from trainer_support import make_job, metrics, newest, run_ranks, threads_of_gloo
from two_ranks import OTHER, job_of

from penstock.trainer import Ranks, TrainerConfig, train
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import Archive
from penstock.weight_sync import Manifest, read_verified

pytestmark = pytest.mark.torch
BY_KIND = {family.kind: family for family in FAMILIES}


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
ALGORITHMS: dict[str, dict[str, Any]] = {"default": {}, "everything": EVERYTHING}


def settings_of(algorithm: str) -> dict[str, Any]:
    return {"steps": 4, "minibatches": 2, "micro_batch_tokens": 48, **ALGORITHMS[algorithm]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """A folder of each run on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    stopping = {"stop": {"metric": "reward", "target": 0.0}, "checkpoint_every": 100}
    cases = {
        **{name: {"model": tiny_model, "settings": settings_of(name)} for name in ALGORITHMS},
        **{name: {"model": tiny_model, "bad": name} for name in ("vocabulary", "uneven", *OTHER)},
        "nan": {"model": poisoned(tmp_path_factory.mktemp("model")), "bad": "nan"},
        "patient": {"model": tiny_model},
        "stopping": {"model": tiny_model, "settings": stopping},
    }
    return run_cases(folder, cases)


def run_cases(folder: Path, cases: dict[str, Any]) -> Path:
    """`folder`, with a folder of each case."""
    run_ranks("two_ranks.py", folder, json.dumps(cases))
    return folder


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_give_one_ranks_results(algorithm: str, runs: Path, tmp_path: Path, tiny_model: str) -> None:
    assert_one_ranks_results(algorithm, runs / algorithm, tmp_path, tiny_model)


@pytest.mark.deep
def test_whole_runs_of_replicated_shards_give_one_ranks_results(tmp_path: Path, tiny_model: str) -> None:
    """HSDP with activations on the host: batches shared out, checkpoints, versions and the final model."""
    here = {"ranks": 2, "parallel": {"replicate": 2}, "activation_offload": True}
    cases = {name: {"model": tiny_model, "settings": {**settings_of(name), **here}} for name in ALGORITHMS}
    two = run_cases(folder_in(tmp_path, "two"), cases)
    for name in ALGORITHMS:
        assert_one_ranks_results(name, two / name, folder_in(tmp_path, name), tiny_model)


@pytest.mark.deep
def test_two_ranks_give_one_ranks_results_of_layers_that_share_parameters(tmp_path: Path) -> None:
    model = BY_KIND["Zamba2"].save(folder_in(tmp_path, "model"))
    two = run_cases(folder_in(tmp_path, "two"), {"default": {"model": model, "settings": settings_of("default")}})
    assert_one_ranks_results("default", two / "default", folder_in(tmp_path, "one"), model)


def folder_in(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def assert_one_ranks_results(algorithm: str, two: Path, one: Path, tiny_model: str) -> None:
    asyncio.run(train(make_job(one, tiny_model, settings_of(algorithm))))
    assert endings(two) == ["trained", "trained"]
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
    published = json.loads((two / "published.json").read_text())
    assert published["version"] == 4
    assert_same_bits(read_verified(Manifest.parse(published["manifest"])), found)
    check_one_rank_reads(two, tiny_model, found, TrainerConfig(**ALGORITHMS[algorithm]))


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def check_one_rank_reads(folder: Path, model: str, expected: dict[str, torch.Tensor], config: TrainerConfig) -> None:
    """A checkpoint of two ranks, in one: the same weights to the bit, and the optimizer's moments."""
    checkpoint = newest(CheckpointStore(folder / "run" / "checkpoints", keep=2))
    assert (checkpoint.step, checkpoint.ranks) == (4, 2)
    ranks = Ranks.open(timeout_s=30)
    try:
        engine = FSDPEngine(model, config, ranks)
        engine.load(checkpoint.path, checkpoint.ranks)
        restored = dict(engine.weights(torch.float32))
    finally:
        ranks.close()
    assert_same_bits(restored, expected)
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert steps == {8}, "two updates in each of four steps"


def endings(folder: Path) -> list[str]:
    """How each of two ranks ended."""
    return [(folder / f"ended_{rank}").read_text() for rank in range(2)]


def test_a_nan_on_one_rank_is_skipped_on_both_archived_and_stops_both(runs: Path) -> None:
    """Only rank 1 has the token whose embedding is NaN. No rank waits for the other; both archive their shares."""
    folder = runs / "nan"
    first, second = endings(folder)
    assert first == second
    assert first.startswith("TrainingDiverged: step 1: loss nan, gradient norm nan; 2 steps in a row")
    files = Counter(file.step for file in Archive(folder / "archive").files())
    assert files == {0: 2, 1: 2}
    assert [line["updates_skipped"] for line in metrics(folder)] == [1]


def test_what_one_rank_cannot_train_leaves_the_step_on_both(runs: Path) -> None:
    """Rank 1's group of each step has tokens that the model does not know."""
    folder = runs / "vocabulary"
    assert endings(folder) == ["trained", "trained"]
    assert [(line["groups"], line["episodes"], line["updates"]) for line in metrics(folder)] == [(1, 4, 1)] * 6


@pytest.mark.parametrize(
    ("case", "held"),
    [
        (
            "other groups",
            ["rank 0: step 1, 2 groups, only here train/0000/00000003 of 4, trains train/0000/00000003 of 4",
             "rank 1: step 1, 2 groups, only here train/0000/00000004 of 4, trains train/0000/00000002 of 4"],
        ),
        (
            "other lengths",
            [f"rank {rank}: step 1, 2 groups, only here none, trains train/0000/00000003 of 4" for rank in range(2)],
        ),
    ],
)  # fmt: skip
def test_ranks_that_hold_different_batches_do_not_train_them(runs: Path, case: str, held: list[str]) -> None:
    first, second = endings(runs / case)
    assert first == second
    assert first.startswith("BatchesDiffer: step 1: ")
    assert all(one in first for one in held), first
    assert [line["step"] for line in metrics(runs / case)] == [0]
    assert not threads_of_gloo(runs / case)


def test_groups_that_ranks_cannot_share_evenly_give_one_ranks_results(
    runs: Path, tmp_path: Path, tiny_model: str
) -> None:
    """Three groups in two minibatches on two ranks: a rank without a group goes through all collectives."""
    one, two = tmp_path, runs / "uneven"
    asyncio.run(train(job_of("uneven", one, tiny_model)))
    assert endings(two) == ["trained", "trained"]
    assert not threads_of_gloo(two), "after a sound run neither"
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert (a["tokens_trained"], a["updates"], a["groups"]) == (b["tokens_trained"], b["updates"], 3)


def test_two_ranks_publish_deltas_of_what_each_of_them_has(runs: Path) -> None:
    """Rank 0 is given no whole version to compare: `two_ranks` refuses that."""
    published = json.loads((runs / "uneven" / "published.json").read_text())
    manifest = Manifest.parse(published["manifest"])
    assert [file.base_version for file in manifest.files] == [None, 1]
    assert manifest.bytes < manifest.files[0].bytes / 4
    final = load_file(runs / "uneven" / "run" / "final_model" / "model.safetensors")
    assert_same_bits(read_verified(manifest), {name: tensor.bfloat16() for name, tensor in final.items()})


def test_all_ranks_stop_together(runs: Path) -> None:
    assert endings(runs / "stopping") == ["trained", "trained"]
    assert len(metrics(runs / "stopping")) == 1
    assert (runs / "stopping" / "run" / "final_model" / "model.safetensors").exists()


def test_ranks_meet_however_late_one_comes(runs: Path) -> None:
    """Later than the deadline of a collective."""
    assert endings(runs / "patient") == ["met", "met"]


@pytest.mark.deep
def test_ranks_wait_for_a_disk_longer_than_for_a_collective(tmp_path: Path, tiny_model: str) -> None:
    """Rank 1 comes to the next version while rank 0 still writes this one."""
    settings = {"steps": 3, "checkpoint_every": 1, "collective_timeout_s": 10.0, "rank_timeout_s": 0}
    case = {"model": tiny_model, "settings": settings, "disk_s": 15.0}
    assert endings(run_cases(tmp_path, {"slow disk": case}) / "slow disk") == ["trained", "trained"]


def test_collectives_of_one(ranks: Ranks) -> None:
    assert (ranks.rank, ranks.world, ranks.is_rank0) == (0, 1, True)
    assert ranks.gather({"a": 1.5}) == [{"a": 1.5}]
    assert ranks.data is ranks
    assert ranks.is_replica_leader
    assert ranks.from_rank0([1, None]) == [1, None]
    assert ranks.any(True)
    assert not ranks.any(False)
