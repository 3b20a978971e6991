"""Deterministic trajectories, a queue with a worker in it, jobs, and small things that several test files make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from tests.faulty_queue import Crash, FaultyQueue

from penstock.rollout_server import RolloutConfig
from penstock.trainer import DataConfig, TrainerConfig, TrainJob, train
from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Batch,
    DataCursor,
    Lease,
    Limits,
    RunContext,
    Segment,
    Status,
    Task,
    Trajectory,
    Waiting,
)

if TYPE_CHECKING:
    from penstock.trainer.state.checkpoint import CheckpointInfo, CheckpointStore
    from penstock.transfer_queue import Archive

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
"""Of programs of ranks."""
VOCAB = 64
BATCHES = {0: [["train/3#0", "train/3#1"], ["train/7#0"]], 12: [["train/9#1"]]}
"""Of a checkpoint that `save` makes."""
ROWS = 10
"""Tasks of an epoch."""


def run_ranks(program: str, *arguments: object) -> None:
    """A program of this folder, which starts ranks."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def make_segment(rng: np.random.Generator, version: int, prompt: int = 6, response: int = 14) -> Segment:
    """Two sampled runs with an observation between them."""
    mask = np.ones(response, dtype=np.uint8)
    pause, again = response // 3, response // 2
    mask[pause:again] = 0
    logprobs = np.where(mask == 1, -np.abs(rng.normal(3.0, 0.5, response)), 0.0)
    return Segment(
        prompt_ids=rng.integers(1, VOCAB, prompt).astype(np.int32),
        response_ids=rng.integers(1, VOCAB, response).astype(np.int32),
        response_mask=mask,
        response_logprobs=logprobs.astype(np.float32),
        version_spans=np.array([[version, 0, pause], [version, again, response]], dtype=np.int32),
        turn_starts=np.array([0, again], dtype=np.int32),
    )


def make_trajectory(task_id: str, member: int, version: int) -> Trajectory:
    episode_id = f"{task_id}#{member}"
    rng = np.random.default_rng(xxhash.xxh32_intdigest(episode_id.encode()))
    segment = make_segment(rng, version, int(rng.integers(3, 9)), int(rng.integers(9, 24)))
    reward = float(rng.integers(0, 2))
    return Trajectory(
        episode_id, task_id, [segment], reward, COMPLETED, num_turns=2, metrics={"tool_calls": 1.0 + member}
    )


def continued(trajectory: Trajectory, prompt: Any) -> Trajectory:
    """Two segments: the second one has `prompt` and the first one's last sampled tokens as its prompt."""
    first = replace(trajectory.segments[0], prompt_ids=prompt)
    return replace(trajectory, segments=[first, replace(first, prompt_ids=np.append(prompt, first.response_ids[-3:]))])


def taught(trajectory: Trajectory, top_k: int = 0) -> Trajectory:
    """With logprobs of a teacher on sampled tokens, and its `top_k` likeliest ids in their places."""
    segments = []
    for number, segment in enumerate(trajectory.segments):
        rng = np.random.default_rng(number)
        values = np.where(segment.response_mask == 1, -rng.random(len(segment.response_ids)) * 6, 0.0)
        made = replace(segment, teacher_logprobs=values.astype(np.float32))
        segments.append(with_tops(made, rng, top_k) if top_k else made)
    return replace(trajectory, segments=segments)


def with_tops(segment: Segment, rng: np.random.Generator, top_k: int) -> Segment:
    """Of a distribution over the vocabulary for each sampled token."""
    logits = rng.normal(0.0, 2.0, (int(segment.response_mask.sum()), VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :top_k]
    values = np.take_along_axis(logprobs, ids, axis=-1)
    return replace(segment, teacher_top_ids=ids.astype(np.int32), teacher_top_logprobs=values.astype(np.float32))


class ProducingQueue(FaultyQueue):
    """`FaultyQueue` with a worker of its own. What a step trains on does not depend on how far the trainer got ahead:
    its episodes are of the oldest version that admission allows."""

    def __init__(
        self,
        limits: Limits,
        produce: Callable[[str, int, int], Trajectory] = make_trajectory,
        archive: Archive | None = None,
    ) -> None:
        super().__init__(archive)
        self._state.limits, self._config = limits, ""
        self.produce = produce
        self.starved = False
        """It has no worker."""
        self.twin = False
        """In a process that neither feeds nor publishes: it makes the batches of the first rank's queue."""
        self.steps: dict[int, Sequence[Sequence[str]]] = {}
        self.announced: list[Announcement] = []
        self.renewed: list[int] = []
        self.most_held = 0
        """Most payloads of leased steps that the store ever held."""

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def committed(self) -> int:
        return self._state.committed_step

    @property
    def waiting(self) -> list[Task]:
        """Queued tasks, in order."""
        return [group.task for group in self._state.in_state("queued")]

    async def _work(self) -> None:
        state, limits = self._state, self._state.limits
        if evaluations := len(state.open_episodes(train=False, version=state.version)):
            await self._complete(await self.lease_episodes("worker", evaluations, state.version))
        while not self.starved:
            step = state.next_step + len(state.in_state("admitted", "ready")) // limits.groups_per_step
            version = max(0, step - limits.max_staleness)
            if version > state.version or not (leases := await self.lease_episodes("worker", 1024, version)):
                return
            await self._complete(leases)

    async def _complete(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            await self.complete(lease, self.produce(lease.task.task_id, lease.member, lease.min_version))

    def numbers_of(self, step: int) -> Sequence[int]:
        """A twin's tasks of a step."""
        per_step = self._state.limits.groups_per_step
        return range(step * per_step, (step + 1) * per_step)

    def join_training(self, epoch: int) -> None:
        self._state.epoch = epoch if self.twin else self._state.epoch
        super().join_training(epoch)

    async def status(self) -> Status:
        await self._work()
        return await super().status()

    async def lease_batch(self, step: int) -> Batch | Waiting:
        if self.twin and step not in self._state.batches:
            await self.submit([Task(task_name(n), "train", [], "test", None) for n in self.numbers_of(step)])
            self._state.version = step
        await self._work()
        batch: Batch | Waiting = await super().lease_batch(step)
        if isinstance(batch, Batch):
            self.steps[step] = batch.groups
            members = [one for group in self._state.in_state("shipped") for one in group.members]
            self.most_held = max(self.most_held, sum(one.payload is not None for one in members))
        return batch

    async def publish_version(self, announcement: Announcement) -> bool:
        before = self.version
        try:
            return bool(await super().publish_version(announcement))
        finally:
            if self.version > before:
                self.announced.append(announcement)

    async def renew_manifest(self, announcement: Announcement) -> bool:
        self.renewed.append(announcement.version)
        self.announced[-1] = announcement
        return await super().renew_manifest(announcement)


async def crash(job: TrainJob, moment: str, call: str, number: int) -> None:
    """Trains until the process dies before or after this call."""
    job.run.queue.crash_at = (moment, call, number)
    with pytest.raises(Crash):
        await train(job)


def task_name(number: int) -> str:
    """Of the n-th training task."""
    epoch, index = divmod(number, ROWS)
    return f"train/{epoch:04d}/{index:08d}"


def write_rows(path: Path, count: int = ROWS) -> str:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"question {n}"}],
            "data_source": "test",
            "reward_model": {"ground_truth": str(n)},
        }
        for n in range(count)
    ]
    # Replaced, not written: two ranks of a test do this at once.
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)
    return str(path)


def archive_in(folder: Path) -> Archive:
    """Imported here: pyarrow starts threads, and processes that fork ranks have none."""
    from penstock.transfer_queue import Archive

    return Archive(folder / "archive", "test", 1 << 30)


def make_job(
    folder: Path,
    model: str,
    config: Mapping[str, Any] | None = None,
    *,
    queue: Any = None,
    token: str = "",
    data: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    **changes: Any,
) -> TrainJob:
    """A job of ten rows; `config`, `data` and `rollout` are settings of these sections. `archives`: what it trains."""
    archive = archive_in(folder) if changes.pop("archives", False) else None
    limits = Limits(group_size=4, groups_per_step=2, max_staleness=changes.pop("max_staleness", 1))
    settings = {"steps": 6, "lr": 1e-3, "eps": 1e-4, "checkpoint_every": 2, "batch_timeout_s": 200.0, **(config or {})}
    values: dict[str, Any] = {
        "run": RunContext(queue or ProducingQueue(limits, archive=archive), model, token),
        "config": TrainerConfig(**settings),
        "limits": limits,
        "run_dir": folder / "run",
        "weights_dir": folder / "weights",
        "data": DataConfig(**{"train": write_rows(folder / "train.jsonl"), **(data or {})}),
        "rollout": RolloutConfig(**(rollout or {})),
        "archive": archive,
        **changes,
    }
    return TrainJob(**values)


async def check_accounts(job: TrainJob) -> list[dict[str, Any]]:
    """As `assert_books_balance`, of a run on a `ProducingQueue`."""
    queue = job.run.queue
    metrics = assert_books_balance(await queue.status(), job.run_dir, job.config.steps)
    recorded = {line["step"]: line["episodes"] for line in lines(job, "steps.jsonl")}
    assert recorded == {step: [one for group in groups for one in group] for step, groups in queue.steps.items()}
    assert all(line["staleness_max"] <= job.limits.max_staleness for line in metrics)
    return metrics


def lines(job: TrainJob, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / name).read_text().splitlines()]


def final_weights(job: TrainJob) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(job.run_dir / "final_model" / "model.safetensors")


def assert_weights(job: TrainJob, expected: Mapping[str, Any]) -> None:
    for name, tensor in final_weights(job).items():
        assert tensor.equal(expected[name]), name


def assert_books_balance(status: Status, run_dir: Path, steps: int) -> list[dict[str, Any]]:
    """A run of `make_job` has ended: each of its trajectories is in one committed step, and nothing else is left.

    Returns the lines of ``metrics.jsonl``.
    """
    assert (status.version, status.committed_step, status.bytes) == (steps, steps, 0)
    left = ("queued", "admitted", "ready", "shipped", "trained", "dead", "dropped_over_age")
    assert [status.groups[name] for name in left] == [0] * len(left)
    assert status.groups["committed"] == steps * 2
    assert (status.episodes["trained"], status.episodes["committed"]) == (steps * 8, steps * 8)
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(steps))
    assert sorted(e for line in lines for e in line["episodes"]) == sorted(
        f"{task_name(n)}#{m}" for n in range(steps * 2) for m in range(4)
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(steps))
    assert all(line["tokens_masked"] == 0 for line in metrics)
    return metrics


def episodes(rewards: Sequence[float], group: Sequence[int], turns: Any = None, **changes: Any) -> Any:
    """`Episodes` by hand. `turns`: per episode the numbers of tokens of its turns; one turn of one token by default."""
    import torch

    from penstock.trainer.advantages import Episodes

    turns = turns or [[1]] * len(rewards)
    counts = torch.tensor([len(lengths) for lengths in turns])
    lengths = torch.tensor([tokens for lengths in turns for tokens in lengths])
    tokens = int(lengths.sum())
    made = {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group": torch.tensor(group),
        "turn_rewards": torch.zeros(len(lengths), dtype=torch.float64),
        "turn_episode": torch.arange(len(counts)).repeat_interleave(counts),
        "turn_state": torch.arange(len(lengths)),
        "turn_path": torch.arange(len(lengths)),
        "token_turn": torch.arange(len(lengths)).repeat_interleave(lengths),
        "token_rewards": torch.zeros(tokens, dtype=torch.float64),
        "trained": torch.ones(tokens, dtype=torch.bool),
    }
    given = {name: torch.tensor(value, dtype=made.get(name, made["rewards"]).dtype) for name, value in changes.items()}
    return Episodes(**{**made, **given})


def loss_by_hand(name: str, ratios: Sequence[float], advantages: Sequence[float], **changes: Any) -> tuple[Any, Any]:
    """(the loss of tokens whose probability became `ratios` times what it was, their logprobs with a gradient)"""
    import torch

    from penstock.trainer.losses import LOSSES, LossInput

    options = changes.pop("options", {})
    proximal = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprobs = (proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    given = {
        "weights": torch.tensor(changes.pop("weights", [1.0] * len(ratios)), dtype=torch.float64),
        "segment": torch.tensor(changes.pop("segment", [0] * len(ratios)), dtype=torch.long),
        "chosen": torch.tensor(changes.pop("chosen", [False] * len(ratios)), dtype=torch.bool),
    }
    batch = LossInput(logprobs, proximal, proximal, torch.tensor(advantages, dtype=torch.float64), **given)
    return LOSSES.bind(name, options)(batch), logprobs


def broken_loss(batch: Any) -> Any:
    """A policy loss that is never a number."""
    from penstock.trainer.losses import LOSSES

    result = LOSSES.get("decoupled_ppo")(batch)
    return replace(result, per_token=result.per_token * float("nan"))


def one_pack(tokens: int, vocab: int) -> Any:
    """Two rows of together `tokens` tokens, of which all but a few at the rows' starts are sampled."""
    from penstock.trainer import ModelLimits, make_row
    from penstock.trainer.packing import join_rows

    rng = np.random.default_rng(0)
    limits, half = ModelLimits(context=tokens, vocab=vocab), tokens // 2
    made = [make_segment(rng, 0, prompt=8, response=half - 8) for _ in range(2)]
    return join_rows([make_row(n, one, "", step=0, bound=0, model=limits) for n, one in enumerate(made)])


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def threads_of_gloo(folder: Path) -> list[str]:
    """Of all ranks, at their very end."""
    lists = [path.read_text() for path in folder.glob("threads_*")]
    assert lists
    return [name for names in lists for name in names.split("\n") if "gloo" in name]


def train_one(engine: Any, ranks: Any, step: int) -> dict[str, Any]:
    """One step on trajectories of its own; returns the weights after it."""
    import torch

    from penstock.trainer import Learner, make_step_batch

    trajectories = [make_trajectory(f"train/{step}", m, step) for m in range(4)]
    batch = make_step_batch(Batch(step, [[t.episode_id for t in trajectories]]), [0], trajectories, 0, engine.limits)
    learner = Learner(engine.config, engine, ranks)
    scored = learner.score(batch)
    learner.update(batch, scored, learner.advantages(batch, scored))
    return dict(engine.weights(torch.float32))


def save(engine: Any, ranks: Any, store: Any, step: int, cursor: DataCursor = DataCursor()) -> Path:
    """A whole checkpoint of the engine."""
    engine.begin_save(store.unfinished(step)).result(timeout=300)
    path: Path = store.seal(step, cursor, ranks.world, BATCHES).path
    return path


def newest(store: CheckpointStore) -> CheckpointInfo:
    """The newest whole checkpoint, as one rank finds it."""
    from penstock.trainer.state.restore import newest_whole

    echo = {"from_rank0": lambda one: one, "gather": lambda one: [one], "meet": lambda _timeout_s: None}
    alone: Any = SimpleNamespace(rank=0, world=1, is_rank0=True, **echo)
    found = newest_whole(store, alone)
    assert found is not None
    return found
