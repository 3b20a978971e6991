"""Whole runs on the queue in memory: what is left behind, crashes in every gap, stops."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from tests.tiny_model import save_tiny_model
from tests.until import until
from trainer_support import (
    Crash,
    assert_weights,
    check_accounts,
    crash,
    final_weights,
    lines,
    make_job,
    make_trajectory,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.trainer import BadJob, BatchTimeout, DataError, Ranks, train
from penstock.trainer.state.checkpoint import CheckpointStore, save_timeout_s
from penstock.transfer_queue import Archive, DataCursor, TrainerFenced, Trajectory
from penstock.weight_sync import Manifest, read_verified

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbed."""
    job = make_job(tmp_path_factory.mktemp("reference"), tiny_model)
    asyncio.run(train(job))
    return final_weights(job)


async def test_a_run_leaves_everything(tmp_path: Path, tiny_model: str) -> None:
    evals = write_rows(tmp_path / "eval.jsonl", 5)
    job = make_job(tmp_path, tiny_model, {"eval_every": 3}, data={"eval": evals, "eval_limit": 3})
    await train(job)
    metrics, status = await check_accounts(job), await job.run.queue.status()
    assert await job.run.queue.cursor() == DataCursor(1, 2)
    assert status.other_splits == {}
    assert [(line["version"], line["episodes"], line["failed"]) for line in lines(job, "eval.jsonl")] == [
        *((3, 3, 0), (6, 3, 0))
    ]
    assert [line["step"] for line in metrics if "eval/reward" in line] == [2, 5]
    assert all(line["staleness_max"] <= 1 and line["wall_s"] > 0 and line["tokens_per_s"] > 0 for line in metrics)
    assert all(0 < line["length_decile/1"] <= line["length_decile/10"] for line in metrics)
    assert {line["over_age_share/10"] for line in metrics} == {0.0}
    assert sorted(p.name for p in (job.run_dir / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    assert {"trainer:batch", "trainer:publish", "trainer:checkpoint"} <= set(status.waits_s)
    first = json.loads((job.run_dir / "trajectories" / "step_000000.jsonl").read_text().splitlines()[0])
    assert [run["mask"] for run in first["segments"][0]["runs"]] == [1, 0, 1]
    assert first["segments"][0]["runs"][0]["text"].startswith("t")
    assert list((job.run_dir / "tensorboard").iterdir())


async def test_failed_attempts_are_faults_of_their_step(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"steps": 2})
    queue, cause = job.run.queue, "environment: step 1 raised KeyError"

    def produce(*asked: Any) -> Trajectory:
        queue._state.failures[cause] += 1
        return make_trajectory(*asked)

    queue._state.failures["of an earlier life"] = 9
    queue.produce = produce
    await train(job)
    for line in lines(job, "metrics.jsonl"):
        assert line["faults"] == ({cause: line["attempts_failed"]} if line["attempts_failed"] else {})
    assert lines(job, "metrics.jsonl")[0]["attempts_failed"] > 0


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


CALLS = [
    *(("lease_batch", 0), ("lease_batch", 3), ("publish_version", 1), ("publish_version", 3), ("publish_version", 4)),
    *(("publish_version", 6), ("commit", 2), ("commit", 4), ("commit", 6)),
]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("call", "number"), CALLS)
async def test_a_crash_in_any_gap_changes_nothing(
    tmp_path: Path, tiny_model: str, moment: str, call: str, number: int, reference: dict[str, torch.Tensor]
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, moment, call, number)
    await train(job)
    await check_accounts(job)
    assert_weights(job, reference)


async def test_a_crash_between_rename_and_commit_and_in_the_middle_of_a_save(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await check_accounts(job)
    assert_weights(job, reference)


async def test_weights_that_went_with_the_machine_are_written_anew(tmp_path: Path, tiny_model: str) -> None:
    """No checkpoint of version 4 may be there, or the restarted trainer goes on to publish 4 and need not renew 3."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    await crash(job, "before", "publish_version", 4)
    lost = read_verified(Manifest.parse(job.run.queue.announced[-1].manifest))
    for path in job.weights_dir.iterdir():
        path.unlink()
    await train(job)
    assert job.run.queue.renewed == [3]
    await check_accounts(job)
    assert lost.keys() == final_weights(job).keys()


DELTAS: dict[str, Any] = {"weights_full_every": 3, "dtype": "bfloat16"}
SMALL_STEPS: dict[str, Any] = {"lr": 1e-6}


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_versions_are_changes_of_the_one_before_and_a_new_trainer_begins_with_a_full_one(
    tmp_path: Path, tiny_model: str, moment: str
) -> None:
    job = make_job(tmp_path, tiny_model, SMALL_STEPS, rollout=DELTAS)
    await crash(job, moment, "publish_version", 4)
    before = len(job.run.queue.announced)
    assert read_verified(Manifest.parse(job.run.queue.announced[-1].manifest)), "who joins late finds the whole chain"
    await train(job)
    await check_accounts(job)
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
    await crash(job, "before", "publish_version", 4)
    first = job.run.queue.announced[-1].manifest
    await crash(job, "before", "lease_batch", 1)
    moved = job.run.queue.announced[-1].manifest
    assert job.run.queue.renewed == [3]
    assert moved["url"] != first["url"]
    assert moved["tensors"] == first["tensors"]
    assert [link["version"] for link in moved["chain"]] == [1, 2]
    assert all(link["place"].startswith(moved["url"].rpartition("/")[0]) for link in moved["chain"])
    await train(job)
    await check_accounts(job)


async def test_a_lost_link_is_lost_weights(tmp_path: Path, tiny_model: str) -> None:
    """Servers that run could do without the full version, those that start could not."""
    job = make_job(tmp_path, tiny_model, {**SMALL_STEPS, "checkpoint_every": 100}, rollout=DELTAS)
    await crash(job, "before", "publish_version", 4)
    (link,) = job.weights_dir.glob("weights-00000001-e*.safetensors")
    link.unlink()
    await train(job)
    assert job.run.queue.renewed == [3]


async def test_spilled_steps_do_not_pile_up_and_are_replayed_from_the_archive(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor]
) -> None:
    """A step has 8 episodes. Held at once: the step that is read ahead, the one in training, and the one on its way."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100}, archives=True)
    await crash(job, "after", "lease_batch", 4)
    assert (await job.run.queue.status()).episodes["spilled"] >= 2 * 8
    await train(job)
    await check_accounts(job)
    assert job.run.queue.most_held <= 3 * 8
    assert "trainer:spill" in (await job.run.queue.status()).waits_s
    assert_weights(job, reference)


async def test_cancelling_saves_commits_and_the_next_start_goes_on(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor]
) -> None:
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    running = asyncio.create_task(train(job))
    await until(lambda: job.run.queue.version >= 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    stopped_at = job.run.queue.version
    assert job.run.queue.committed == stopped_at >= 3
    assert (job.run_dir / "checkpoints" / f"step_{stopped_at:08d}" / "complete").exists()
    assert not (job.run_dir / "final_model").exists()
    await train(job)
    await check_accounts(job)
    assert_weights(job, reference)


async def test_a_forgotten_announcement_is_said_again(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue lost its last second; a server that joins must learn of the weights while the trainer waits."""
    monkeypatch.setattr("penstock.trainer.source.REMIND_S", 0.05)
    job = make_job(tmp_path, tiny_model)
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(200):
        while job.run.queue.version == 0:
            await asyncio.sleep(0.01)
        job.run.queue.starved = True
        while not job.run.queue.renewed:
            job.run.queue._state.announcement = None
            await asyncio.sleep(0.01)
    assert job.run.queue.renewed[0] == job.run.queue.version
    job.run.queue.starved = False
    await running
    await check_accounts(job)


async def test_cancelling_while_no_batch_comes_is_quick(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"batch_timeout_s": 20.0})
    job.run.queue.starved = True
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(200):
        while await job.run.queue.cursor() == DataCursor():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_finished_run_is_finished(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model)
    await train(job)
    before = (job.run_dir / "metrics.jsonl").read_text()
    await train(job)
    await check_accounts(job)
    assert (job.run_dir / "metrics.jsonl").read_text() == before


async def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, tiny_model: str, reference: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, "before", "commit", 4)
    shard = job.run_dir / "checkpoints" / "step_00000004" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "step_00000004 is damaged (__0_0.distcp differs from its checksum); taking the one before" in caplog.text
    metrics = await check_accounts(job)
    assert [line["checkpoints_damaged"] for line in metrics] == [0, 0, 1, 1, 1, 1]
    assert_weights(job, reference)


async def test_a_batch_that_does_not_come_names_the_cause(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, {"batch_timeout_s": 0.3})
    job.run.queue.starved = True
    with pytest.raises(BatchTimeout, match=r"no batch for step 0 .*trainer\.batch_timeout_s.* 6 queued\. .*version 0"):
        await train(job)


@pytest.mark.parametrize(
    ("model", "data", "quotas", "error", "message"),
    [
        ("", {"train": "none.jsonl"}, {}, DataError, "no such file"),
        ("nowhere", {}, {}, OSError, "nowhere"),
        ("", {}, {"test": 1}, BadJob, r"quotas: test 1 = 1 < groups_per_step = 2: .*train\.jsonl"),
    ],
)
async def test_bad_data_and_a_bad_model_are_refused_before_the_queue_is_touched(
    tmp_path: Path, tiny_model: str, model: str, data: Any, quotas: Any, error: type[Exception], message: str
) -> None:
    job = make_job(tmp_path, str(tmp_path / model) if model else tiny_model, data=data)
    with pytest.raises(error, match=message):
        await train(replace(job, limits=replace(job.limits, quotas=quotas)))
    assert await job.run.queue.cursor() == DataCursor()


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


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_crash_while_a_step_is_spilled(
    tmp_path: Path, tiny_model: str, moment: str, reference: dict[str, torch.Tensor]
) -> None:
    """Steps 0 to 2 are trained again: from the archive, or from the store where that came too late."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100}, archives=True)
    await crash(job, moment, "spill", 2)
    await train(job)
    await check_accounts(job)
    assert_weights(job, reference)
    assert (await job.run.queue.status()).episodes["spilled"] == 5 * 8
    assert Archive(tmp_path / "archive").verify() == []
    assert Archive(tmp_path / "archive").index()["step"].to_pylist() == [step for step in range(6) for _ in range(8)]


@pytest.mark.parametrize(("every", "spilled"), [(3, 4 * 8), (1, 0)])
async def test_a_step_whose_checkpoint_is_due_is_not_spilled(
    tmp_path: Path, tiny_model: str, every: int, spilled: int
) -> None:
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": every}, archives=True)
    await train(job)
    await check_accounts(job)
    assert (await job.run.queue.status()).episodes["spilled"] == spilled


@pytest.mark.parametrize(("call", "number"), [("lease_batch", 3), ("publish_version", 3), ("commit", 4)])
async def test_a_trainer_that_was_replaced_ends(
    tmp_path: Path, tiny_model: str, call: str, number: int, reference: dict[str, torch.Tensor]
) -> None:
    """Another one claims the run while this one is alive: this one ends, the next one trains every step once."""
    job = make_job(tmp_path, tiny_model)
    job.run.queue.replace_at = (call, number)
    with pytest.raises(TrainerFenced, match="the one in its place"):
        await train(job)
    await train(job)
    await check_accounts(job)
    assert_weights(job, reference)
