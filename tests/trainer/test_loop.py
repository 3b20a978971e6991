"""Whole runs against a scripted queue: what is left behind, crashes in every gap, stops, clear failures."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from finished_run import check_accounts, final_weights, lines
from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from trainer_support import Crash, make_job, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.common import UnknownName
from penstock.trainer import BadJob, BatchTimeout, DataError, Ranks, TrainJob, train
from penstock.trainer.state.checkpoint import save_timeout_s
from penstock.transfer_queue import DataCursor
from penstock.weight_sync import Manifest, read_verified

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed."""
    job = make_job(tmp_path_factory.mktemp("reference"), tiny_model)
    asyncio.run(train(job))
    return final_weights(job)


async def crash(job: TrainJob, gap: str) -> None:
    """Train until the gap."""
    job.run.queue.crash_at = gap
    with pytest.raises(Crash):
        await train(job)


def assert_weights(job: TrainJob, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in final_weights(job).items():
        assert torch.equal(tensor, expected[name]), name


async def test_a_run_leaves_everything(tmp_path: Path, tiny_model: str) -> None:
    evals = write_rows(tmp_path / "eval.jsonl", 5)
    job = make_job(tmp_path, tiny_model, {"eval_every": 3}, data={"eval": evals, "eval_limit": 3})
    await train(job)
    check_accounts(job)
    metrics = lines(job, "metrics.jsonl")
    assert [line["version"] for line in lines(job, "eval.jsonl")] == [3, 6]
    assert [line["step"] for line in metrics if "eval/reward" in line] == [2, 5]
    assert all(line["staleness_max"] <= 1 and line["wall_s"] > 0 and line["tokens_per_s"] > 0 for line in metrics)
    assert sorted(p.name for p in (job.run_dir / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    assert {"trainer:batch", "trainer:publish", "trainer:checkpoint"} <= set(job.run.queue.waits)
    first = json.loads((job.run_dir / "trajectories" / "step_000000.jsonl").read_text().splitlines()[0])
    assert [run["mask"] for run in first["segments"][0]["runs"]] == [1, 0, 1]
    assert first["segments"][0]["runs"][0]["text"].startswith("t")
    assert list((job.run_dir / "tensorboard").iterdir())


async def test_ranks_wait_for_each_others_part_of_a_checkpoint_by_its_bytes(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(Ranks, "await_saves", lambda ranks, timeout_s: given.append(timeout_s))
    job = make_job(tmp_path, tiny_model, {"steps": 1})
    await train(job)
    weights = load_file(Path(tiny_model) / "model.safetensors")
    numbers = 3 * sum(tensor.numel() for tensor in weights.values()) + len(weights)  # AdamW counts steps for each
    assert given == [save_timeout_s(job.config.publish_timeout_s, 4 * numbers)]


async def test_versions_are_the_models_own_tensors_and_the_last_is_the_final_model(
    tmp_path: Path, tiny_model: str
) -> None:
    job = make_job(tmp_path, tiny_model)
    await train(job)
    published = read_verified(Manifest.parse(job.run.queue.announced[-1].manifest))
    assert published.keys() == load_file(Path(tiny_model) / "model.safetensors").keys()
    for name, tensor in final_weights(job).items():
        assert torch.equal(tensor, published[name])
    model = AutoModelForCausalLM.from_pretrained(job.run_dir / "final_model")
    assert torch.equal(model.lm_head.weight, published["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(job.run_dir / "final_model").decode([5, 6]) == "t5 t6"


async def test_an_untied_head_is_published_too_and_in_the_engines_dtype(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", tokenizer=True, tie_word_embeddings=False)
    job = make_job(tmp_path, model, {"steps": 1}, rollout={"dtype": "bfloat16"})
    await train(job)
    published = read_verified(Manifest.parse(job.run.queue.announced[-1].manifest))
    assert "lm_head.weight" in published
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}


GAPS = [
    f"{moment}:{call}"
    for call in ("lease:0", "lease:3", "publish:1", "publish:3", "publish:4", "publish:6", "commit:2", "commit:4")
    for moment in ("before", "after")
]


@pytest.mark.parametrize("gap", [*GAPS, "before:commit:6", "after:commit:6"])
async def test_a_crash_in_any_gap_changes_nothing(
    tmp_path: Path, tiny_model: str, gap: str, reference: dict[str, torch.Tensor]
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, gap)
    await train(job)
    check_accounts(job)
    assert_weights(job, reference)


async def test_a_crash_between_rename_and_commit_and_in_the_middle_of_a_save(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.trainer.state.checkpoint import CheckpointStore

    seal = CheckpointStore.seal

    def dying(self: CheckpointStore, step: int, *rest: int):
        monkeypatch.setattr(CheckpointStore, "seal", seal)
        raise Crash(f"seal {step}")

    job = make_job(tmp_path, tiny_model)
    monkeypatch.setattr(CheckpointStore, "seal", dying)
    with pytest.raises(Crash, match="seal 2"):
        await train(job)
    assert (job.run_dir / "checkpoints" / "step_00000002.tmp").exists()
    await train(job)
    check_accounts(job)
    assert_weights(job, reference)


async def test_weights_that_went_with_the_machine_are_written_anew(tmp_path: Path, tiny_model: str) -> None:
    """No checkpoint of version 4 may be there, or the restarted trainer goes on to publish 4 and need not renew 3."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    await crash(job, "before:publish:4")
    lost = read_verified(Manifest.parse(job.run.queue.announced[-1].manifest))
    for path in job.weights_dir.iterdir():
        path.unlink()
    await train(job)
    assert job.run.queue.renewed == [3]
    check_accounts(job)
    assert lost.keys() == final_weights(job).keys()


DELTAS: dict[str, Any] = {"weights_full_every": 3, "dtype": "bfloat16"}
SMALL_STEPS: dict[str, Any] = {"lr": 1e-6}


@pytest.mark.parametrize("gap", ["before:publish:4", "after:publish:4"])
async def test_versions_are_changes_of_the_one_before_and_a_new_trainer_begins_with_a_full_one(
    tmp_path: Path, tiny_model: str, gap: str
) -> None:
    job = make_job(tmp_path, tiny_model, SMALL_STEPS, rollout=DELTAS)
    await crash(job, gap)
    before = len(job.run.queue.announced)
    assert read_verified(Manifest.parse(job.run.queue.announced[-1].manifest)), "who joins late finds the whole chain"
    await train(job)
    check_accounts(job)
    bases = [announced.manifest["base_version"] for announced in job.run.queue.announced]
    assert bases[:3] == [None, 1, 2]
    assert bases[before] is None
    assert job.run.queue.renewed == []
    published = read_verified(Manifest.parse(job.run.queue.announced[-1].manifest))
    assert all(torch.equal(tensor.bfloat16(), published[name]) for name, tensor in final_weights(job).items())


async def test_over_http_a_new_trainer_says_where_the_announced_files_are_now(tmp_path: Path, tiny_model: str) -> None:
    """While it replays, nothing is published: without this a server that starts then would ask a dead address."""
    settings = {**SMALL_STEPS, "checkpoint_every": 100}
    job = make_job(tmp_path, tiny_model, settings, rollout={**DELTAS, "weight_transport": "http"}, token="secret")
    await crash(job, "before:publish:4")
    first = job.run.queue.announced[-1].manifest
    await crash(job, "before:lease:1")
    moved = job.run.queue.announced[-1].manifest
    assert job.run.queue.renewed == [3]
    assert moved["url"] != first["url"]
    assert moved["tensors"] == first["tensors"]
    assert [link["version"] for link in moved["chain"]] == [1, 2]
    assert all(link["place"].startswith(moved["url"].rpartition("/")[0]) for link in moved["chain"])
    await train(job)
    check_accounts(job)


async def test_a_lost_link_is_lost_weights(tmp_path: Path, tiny_model: str) -> None:
    """Servers that run could do without the full version, those that start could not."""
    job = make_job(tmp_path, tiny_model, {**SMALL_STEPS, "checkpoint_every": 100}, rollout=DELTAS)
    await crash(job, "before:publish:4")
    (link,) = job.weights_dir.glob("weights-00000001-e*.safetensors")
    link.unlink()
    await train(job)
    assert job.run.queue.renewed == [3]


async def test_spilled_steps_do_not_pile_up_and_are_replayed_from_the_log(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor]
) -> None:
    """A step has 8 episodes. Held at once: the step that is read ahead, the one in training, and the one on its way."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100}, spill=True)
    await crash(job, "after:lease:4")
    assert set(job.run.queue.spilled) >= {e for step in range(2) for group in job.run.queue.steps[step] for e in group}
    await train(job)
    check_accounts(job)
    assert job.run.queue.most_held <= 3 * 8
    assert "trainer:spill" in job.run.queue.waits
    assert_weights(job, reference)


async def test_cancelling_saves_commits_and_the_next_start_goes_on(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor]
) -> None:
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(60):
        while job.run.queue.version < 3:
            await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    stopped_at = job.run.queue.version
    assert job.run.queue.committed == stopped_at >= 3
    assert (job.run_dir / "checkpoints" / f"step_{stopped_at:08d}" / "complete").exists()
    assert not (job.run_dir / "final_model").exists()
    await train(job)
    check_accounts(job)
    assert_weights(job, reference)


async def test_a_forgotten_announcement_is_said_again(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue lost its last second; a server that joins must learn of the weights while the trainer waits."""
    monkeypatch.setattr("penstock.trainer.source.REMIND_S", 0.05)
    job = make_job(tmp_path, tiny_model)
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(60):
        while job.run.queue.version == 0:
            await asyncio.sleep(0.01)
        job.run.queue.starved = job.run.queue.forgetful = True
        while not job.run.queue.renewed:
            await asyncio.sleep(0.01)
    assert job.run.queue.renewed[0] == job.run.queue.version
    job.run.queue.starved = job.run.queue.forgetful = False
    await running
    check_accounts(job)


async def test_cancelling_while_no_batch_comes_is_quick(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model)
    job.run.queue.starved = True
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(60):
        while job.run.queue.place == DataCursor():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_finished_run_is_finished(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model)
    await train(job)
    before = (job.run_dir / "metrics.jsonl").read_text()
    await train(job)
    check_accounts(job)
    assert (job.run_dir / "metrics.jsonl").read_text() == before


async def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, "before:commit:4")
    shard = job.run_dir / "checkpoints" / "step_00000004" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "step_00000004 is damaged (__0_0.distcp differs from its checksum); taking the one before" in caplog.text
    check_accounts(job)


async def test_lost_updates_are_said_and_lost_checkpoints_stop(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, "after:commit:4")
    (job.run_dir / "checkpoints" / "step_00000004" / "complete").unlink()
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "the updates of steps 2 to 3 are lost" in caplog.text
    assert job.run.queue.committed == 6
    assert sorted(p.name for p in (job.run_dir / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004.damaged",
        "step_00000006",
    ]
    for marker in (job.run_dir / "checkpoints").glob("*/complete"):
        marker.unlink()
    with pytest.raises(RuntimeError, match=r"committed 6 steps, and .* holds no whole checkpoint"):
        await train(job)


async def test_a_batch_that_does_not_come_names_the_cause(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"batch_timeout_s": 0.3})
    job.run.queue.starved = True
    with pytest.raises(
        BatchTimeout, match=r"no batch for step 0 within 0 s .*: 6 groups queued\. TransferQueue: version 0"
    ):
        await train(job)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"config": {"correction": None}}, BadJob, r"max_staleness is 1 and trainer\.correction is null"),
        ({"config": {"minibatches": 3}}, BadJob, r"trainer\.minibatches is 3, groups_per_step only 2"),
        ({"config": {"advantage": "grop"}}, UnknownName, "'grop'; did you mean 'grpo'"),
        ({"rollout": {"weight_transport": "http"}}, BadJob, "need the run's token"),
        ({"data": {"train": "none.jsonl"}}, DataError, "no such file"),
        ({"model": "nowhere"}, OSError, "nowhere"),
        ({"limits": {"quotas": {"test": 1}}}, BadJob, r"quotas: test 1 = 1 < groups_per_step = 2: .*train\.jsonl"),
        (
            {
                "config": {"sources": {"x": {"advantage": "reinforce_plus_plus", "group_size": 1}}},
                "limits": {"filter_groups": "zero_variance"},
            },
            BadJob,
            r"trainer\.sources\.x\.group_size 1",
        ),
    ],
)
async def test_what_cannot_be_right_is_refused_before_the_queue_is_touched(
    tmp_path: Path, tiny_model: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    changes = dict(changes)
    model = str(tmp_path / changes.pop("model")) if "model" in changes else tiny_model
    limits = changes.pop("limits", {})
    job = make_job(tmp_path, model, **changes)
    with pytest.raises(error, match=message):
        await train(replace(job, limits=replace(job.limits, **limits)))
    assert job.run.queue.place == DataCursor()


async def test_synchronous_without_correction(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"correction": None, "steps": 3}, max_staleness=0)
    await train(job)
    assert all(line["staleness_max"] == 0 for line in lines(job, "metrics.jsonl"))
    assert all(line["logprob_abs_diff_tokens"] == line["tokens_trained"] for line in lines(job, "metrics.jsonl"))


async def test_groups_of_a_data_source_have_its_own_size(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"sources": {"te*": {"group_size": 3}}, "steps": 2})
    await train(job)
    steps = lines(job, "steps.jsonl")
    assert [[name.rpartition("#")[2] for name in step["episodes"]] for step in steps] == [["0", "1", "2"] * 2] * 2
