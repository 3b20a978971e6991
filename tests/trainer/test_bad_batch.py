"""Losses and gradients that are not finite: skipped, kept, and computed again to the same numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from safetensors.torch import save_file
from tests.tiny_model import save_poisoned_model, save_tiny_model
from trainer_support import make_trajectory
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.trainer import (
    BadDump,
    Learner,
    Ranks,
    Replayed,
    StepBatch,
    TrainerConfig,
    TrainingDiverged,
    make_step_batch,
    replay_dump,
)
from penstock.trainer.bad_batch import BadBatches
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.losses import LOSSES, LossInput, TokenLoss
from penstock.trainer.replay import same
from penstock.trainer.stopping import NothingToTrain
from penstock.transfer_queue import Batch, Segment, Trajectory

pytestmark = pytest.mark.torch


@pytest.fixture
def broken() -> Iterator[Callable[..., str]]:
    """Registers a loss that `spoil` changes, per trained token of a pack."""

    def register(spoil: Callable[[LossInput, torch.Tensor], torch.Tensor]) -> str:
        @LOSSES.register("broken")
        def loss(batch: LossInput) -> TokenLoss:
            result = LOSSES.get("decoupled_ppo")(batch)
            return replace(result, per_token=spoil(batch, result.per_token))

        return "broken"

    yield register
    LOSSES._entries.pop("broken", None)


class Run:
    """A learner that keeps bad batches, and its model."""

    def __init__(
        self, folder: Path, model: str, ranks: Ranks, keep: int = 1, *, routing_replay: bool = False, **settings: Any
    ) -> None:
        self.config = TrainerConfig(**{"lr": 1e-2, "eps": 1e-4, "max_bad_steps": 2, **settings})
        self.engine = FSDPEngine(model, self.config, ranks, temperature=0.7, routing_replay=routing_replay)
        self.folder = folder / "bad_batches"
        dumps = BadBatches(self.folder, keep, model, self.engine, ranks)
        self.learner = Learner(self.config, self.engine, ranks, dumps)

    def batch(self, groups: int = 4, step: int = 1, spoil: Callable[[Any], Any] = lambda t: t) -> StepBatch:
        made = [[spoil(make_trajectory(f"train/{g}", m, 0)) for m in range(4)] for g in range(groups)]
        ids = Batch(step, [[t.episode_id for t in group] for group in made])
        flat = [t for group in made for t in group]
        return make_step_batch(ids, list(range(groups)), flat, 9, self.engine.limits)

    def step(self, batch: StepBatch) -> dict[str, Any]:
        scored = self.learner.score(batch)
        return self.learner.update(batch, scored, self.learner.advantages(batch, scored))

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.engine.weights(torch.float32)])

    def dumps(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


def again(folder: Path, ranks: Ranks) -> Replayed:
    """The replay makes a process group of its own."""
    ranks.close()
    return replay_dump(folder)


def test_a_nan_weight_is_found_by_name(tmp_path: Path, ranks: Ranks) -> None:
    run = Run(tmp_path, save_poisoned_model(tmp_path / "model"), ranks)
    before = run.weights()
    metrics = run.step(run.batch())
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0, equal_nan=True)
    assert run.dumps() == ["step_000001_0"]
    result = again(run.folder / "step_000001_0", ranks)
    assert result.reproduced
    assert math.isnan(result.loss)
    assert "weight model.embed_tokens.weight, element [7, 0] is nan" in result.causes[0].replace("model.model", "model")
    assert any(cause.startswith("output of") and "embed_tokens" in cause for cause in result.causes)


def test_a_token_is_found_by_its_episode_and_place(tmp_path: Path, tiny_model: str, ranks: Ranks, broken: Any) -> None:
    """The third trained token of the pack has an infinite loss."""

    def spoil(batch: LossInput, per_token: torch.Tensor) -> torch.Tensor:
        factors = torch.ones_like(per_token)
        factors[2] = math.inf
        return per_token.abs() * factors + factors - factors.clamp(max=1.0)

    run = Run(tmp_path, tiny_model, ranks, loss=broken(spoil), micro_batch_tokens=100_000)
    batch = run.batch()
    (pack,) = run.learner.score(batch).minibatches[0]
    run.step(batch)
    result = again(run.folder / "step_000001_0", ranks)
    assert result.reproduced
    place = int(pack.positions[pack.predictors[2]]) + 1
    episode = batch.trajectories[int(pack.episode[2])].episode_id
    assert result.causes[0].startswith("loss inf of ")
    assert result.causes[0].endswith(f"token {place} of its segment (id {int(pack.targets[2])}), episode {episode}")


def routed_anyhow(trajectory: Trajectory) -> Trajectory:
    """Read by experts that no router would choose."""

    def routed(segment: Segment) -> Segment:
        draw = np.random.default_rng(len(segment.response_ids))
        tokens = len(segment.prompt_ids) + len(segment.response_ids)
        order = draw.permuted(np.tile(np.arange(8, dtype=np.uint8), (tokens, 2, 1)), axis=-1)
        return replace(segment, routed_experts=order[..., :2])

    return replace(trajectory, segments=[routed(one) for one in trajectory.segments])


def test_a_batch_is_computed_again_by_the_experts_of_its_dump(tmp_path: Path, ranks: Ranks, broken: Any) -> None:
    """The loss depends on logprobs, and these on who reads the tokens."""

    def spoil(batch: LossInput, per_token: torch.Tensor) -> torch.Tensor:
        return per_token + batch.logprobs + (batch.logprobs - batch.logprobs.detach()).sqrt()

    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture = save_tiny_model(tmp_path / "mixture", "Qwen3Moe", tokenizer=True, **shape)
    run = Run(tmp_path, mixture, ranks, routing_replay=True, loss=broken(spoil))
    told = run.batch(spoil=routed_anyhow)
    assert run.step(told)["moe/rerouted"] > 0
    result = again(run.folder / "step_000001_0", ranks)
    assert result.reproduced
    assert math.isfinite(result.loss)
    assert result.loss != 0


def test_a_gradient_alone_is_found_and_the_finite_loss_is_the_same_in_a_later_minibatch(
    tmp_path: Path, tiny_model: str, ranks: Ranks, broken: Any
) -> None:
    """The dump has the weights after the first minibatch, and the logprobs of before it: else the loss differs."""
    wanted: list[int] = []

    def spoil(batch: LossInput, per_token: torch.Tensor) -> torch.Tensor:
        if len(per_token) != wanted[0]:
            return per_token
        return per_token + (batch.logprobs - batch.logprobs.detach()).sqrt()  # 0, with an infinite slope

    run = Run(tmp_path, tiny_model, ranks, loss=broken(spoil), minibatches=2, lr=0.1, micro_batch_tokens=100_000)
    batch = run.batch()
    wanted.append(int(run.learner.score(batch).minibatches[1][0].mask.sum()))
    before = run.weights()
    metrics = run.step(batch)
    assert (metrics["updates"], metrics["updates_skipped"]) == (1, 1)
    assert not torch.equal(run.weights(), before), "the first minibatch was trained"
    assert run.dumps() == ["step_000001_1"]
    result = again(run.folder / "step_000001_1", ranks)
    assert result.reproduced
    assert math.isfinite(result.loss)
    assert result.loss != 0
    assert not math.isfinite(result.grad_norm)
    assert result.causes[0].startswith("gradient of")


def test_a_loss_alone_that_is_not_finite_is_skipped_too(
    tmp_path: Path, tiny_model: str, ranks: Ranks, broken: Any
) -> None:
    """An infinite constant has no gradient: the norm says nothing of it."""
    run = Run(tmp_path, tiny_model, ranks, loss=broken(lambda batch, per_token: per_token + math.inf))
    before = run.weights()
    metrics = run.step(run.batch())
    assert math.isfinite(metrics["grad_norm"])
    assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
    assert torch.equal(run.weights(), before)
    result = again(run.folder / "step_000001_0", ranks)
    assert result.reproduced
    assert (result.loss, math.isfinite(result.grad_norm)) == (math.inf, True)
    assert result.causes[0].startswith("loss inf of token")


def test_the_message_names_the_dump_and_there_are_no_more_than_asked_for(
    tmp_path: Path, tiny_model: str, ranks: Ranks, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, tiny_model, ranks, keep=2, loss=broken(lambda batch, per_token: per_token * math.nan))
    (run.folder / "step_000000_0.tmp").mkdir(parents=True)
    for step in range(2):
        run.step(run.batch(step=step))
    assert "step 1 is skipped: loss nan" in caplog.text
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row.*penstock train replay .*step_000001_0"):
        run.step(run.batch(step=2))
    assert run.dumps() == ["step_000000_0", "step_000001_0"]
    none = Run(tmp_path / "none", tiny_model, ranks, keep=0, loss="broken")
    none.step(none.batch())
    assert none.dumps() == []


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def gone(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """As safetensors itself says it: its error is no `OSError`."""
    save_file(tensors, path.parent / "not-there" / path.name)


@pytest.mark.parametrize(
    ("refusing", "said"), [(full, r"OSError: \[Errno 28\] No space left"), (gone, "SafetensorError: .*No such file")]
)
def test_a_disk_that_refuses_ends_no_run(
    tmp_path: Path,
    tiny_model: str,
    ranks: Ranks,
    broken: Any,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
    refusing: Any,
    said: str,
) -> None:
    run = Run(tmp_path, tiny_model, ranks, loss=broken(lambda batch, per_token: per_token * math.nan))
    monkeypatch.setattr("penstock.trainer.bad_batch.save_file", refusing)
    assert run.step(run.batch())["updates_skipped"] == 1
    assert re.search(f"could not be kept for a replay: {said}", caplog.text)
    assert run.dumps() == []


def test_the_dump_is_readable_checked_and_replayed_by_the_command(
    tmp_path: Path, tiny_model: str, ranks: Ranks, broken: Any
) -> None:
    run = Run(tmp_path, tiny_model, ranks, loss=broken(lambda batch, per_token: per_token * math.nan))
    batch = run.batch()
    run.step(batch)
    ranks.close()
    dump = run.folder / "step_000001_0"
    about = json.loads((dump / "about.json").read_text())
    assert (about["loss"], about["step"]) == ("nan", 1)
    assert about["episodes"] == [[t.episode_id for t in batch.trajectories]]
    assert {"rank_00.safetensors", "episodes_00.jsonl", "model/model.safetensors"} <= set(about["files"])
    assert json.loads((dump / "episodes_00.jsonl").read_text().splitlines()[0])["segments"][0]["runs"][0]["mask"] == 1
    told = CliRunner().invoke(app, ["train", "replay", str(dump)])
    assert told.exit_code == 0, told.output
    assert "step 1, minibatch 0: 1 ranks, 16 episodes" in told.stdout
    assert "first not finite: loss nan of token" in told.stdout
    tensors = dump / "rank_00.safetensors"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    told = CliRunner().invoke(app, ["train", "replay", str(dump)])
    assert told.exit_code == 2
    assert "rank_00.safetensors differs from its checksum" in told.stderr
    (dump / "about.json").unlink()
    with pytest.raises(BadDump, match="no whole dump"):
        replay_dump(dump)


def test_steps_without_a_token_to_train_are_counted_and_then_stop_the_run(
    tmp_path: Path, tiny_model: str, ranks: Ranks
) -> None:
    def without_logprobs(trajectory: Any) -> Any:
        segments = [replace(s, response_logprobs=s.response_logprobs * math.nan) for s in trajectory.segments]
        return replace(trajectory, segments=segments)

    run = Run(tmp_path, tiny_model, ranks)
    before = run.weights()
    for _ in range(2):
        metrics = run.step(run.batch(spoil=without_logprobs))
        assert metrics["tokens_without_logprob"] == metrics["tokens_masked"] == metrics["tokens_sampled"] > 0
        assert (metrics["updates"], metrics["updates_skipped"], metrics["loss"]) == (0, 1, 0.0)
        assert torch.equal(run.weights(), before)
    run.step(run.batch())
    for _ in range(2):
        run.step(run.batch(spoil=without_logprobs))
    with pytest.raises(NothingToTrain, match=r"have no finite logprob.*3 steps in a row.*return logprobs"):
        run.step(run.batch(spoil=without_logprobs))
    assert run.dumps() == []


def test_episodes_without_tokens_and_groups_of_one_are_counted_and_the_rest_is_trained(
    tmp_path: Path, tiny_model: str, ranks: Ranks
) -> None:
    run = Run(tmp_path, tiny_model, ranks)
    groups = [[make_trajectory("train/0", m, 0) for m in range(4)], [make_trajectory("train/1", 0, 0)]]
    groups[0][1] = replace(groups[0][1], segments=[])
    ids = Batch(1, [[t.episode_id for t in group] for group in groups])
    flat = [t for group in groups for t in group]
    batch = make_step_batch(ids, [0, 1], flat, 9, run.engine.limits)
    metrics = run.step(batch)
    assert (metrics["empty_episodes"], metrics["single_member_groups"], metrics["updates"]) == (1, 1, 1)
    scored = run.learner.score(batch)
    advantages = run.learner.advantages(batch, scored).tokens
    alone = [row for row in batch.rows if row.episode == 4]
    assert all(not advantages[row.first_token : row.first_token + len(row.targets)].any() for row in alone)


def test_same() -> None:
    assert same(math.nan, math.nan)
    assert same(math.inf, math.inf)
    assert not same(math.inf, -math.inf)
    assert not same(1.0, math.nan)
    assert same(1.0, 1.00001)
    assert not same(1.0, 1.001)
