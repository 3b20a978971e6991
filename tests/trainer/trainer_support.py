"""Deterministic trajectories, and a queue whose rollout side is a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.rollout_server import RolloutConfig
from penstock.trainer import DataConfig, TrainerConfig, TrainJob
from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    AnnouncementMark,
    BadPayload,
    Batch,
    DataCursor,
    FieldValues,
    Limits,
    RunContext,
    Segment,
    Status,
    StepError,
    Task,
    Trajectory,
    Waiting,
    encode_trajectory,
    get_fields,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
"""Of programs of ranks."""
VOCAB = 64
BATCHES = {0: [["train/3#0", "train/3#1"], ["train/7#0"]], 12: [["train/9#1"]]}
"""Of a checkpoint that `save` makes."""
ROWS = 10
"""Tasks of an epoch."""


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


class Crash(Exception):
    """The process died here."""


class ScriptedQueue:
    """The trainer's side of the queue protocol. Episodes of queued tasks are there as soon as they are asked for.

    `crash_at` names a call, such as ``before:commit:2``: it raises `Crash` once, before or after its effect.
    """

    def __init__(self, limits: Limits, produce: Callable[[str, int, int], Trajectory] = make_trajectory) -> None:
        self.limits = limits
        self.produce = produce
        self.queued: list[Task] = []
        self.place = DataCursor()
        self.steps: dict[int, list[list[str]]] = {}
        self.payloads: dict[str, Trajectory] = {}
        self.spilled: dict[str, Trajectory] = {}
        self.most_held = 0
        """Most payloads of leased steps that the store ever held."""
        self.announced: list[Announcement] = []
        self.renewed: list[int] = []
        self.committed = 0
        self.splits: dict[str, list[Task]] = {}
        self.waits: dict[str, float] = {}
        self.crash_at: str | None = None
        self.starved = False
        self.forgetful = False
        """It does not know any more where the newest weights are."""
        self.twin = False
        """In a process that neither feeds nor publishes: batches are made as the first rank's queue makes them."""

    @property
    def version(self) -> int:
        return self.announced[-1].version if self.announced else 0

    def _maybe_crash(self, moment: str) -> None:
        if moment == self.crash_at:
            self.crash_at = None
            raise Crash(moment)

    async def submit(
        self, tasks: Sequence[Task], cursor: DataCursor | None = None, after: DataCursor | None = None
    ) -> int:
        if cursor is None:
            self.splits[tasks[0].split] = list(tasks)
            return len(tasks)
        if cursor <= self.place:
            return 0
        self.queued += tasks
        self.place = cursor
        return len(tasks)

    async def cursor(self) -> DataCursor:
        return self.place

    async def claim_training(self, holder: str) -> int:
        return 1

    def join_training(self, epoch: int) -> None:
        assert epoch == 1

    async def check_training(self) -> None: ...

    async def lease_batch(self, step: int) -> Batch | Waiting:
        self._maybe_crash(f"before:lease:{step}")
        if step < self.committed:
            raise StepError(f"step {step} is committed")
        if step not in self.steps and self.twin:
            first = step * self.limits.groups_per_step
            names = [task_name(n) for n in range(first, first + self.limits.groups_per_step)]
            self.queued = [Task(name, "train", [], "test", None) for name in names]
            self._make(step)
        if step not in self.steps:
            if self.starved or len(self.queued) < self.limits.groups_per_step:
                return Waiting(f"{len(self.queued)} groups queued")
            if step > self.version + self.limits.max_staleness:
                return Waiting("admission")
            self._make(step)
        self._maybe_crash(f"after:lease:{step}")
        return Batch(step, self.steps[step])

    def _make(self, step: int) -> None:
        # Not the present version: how far the loop got ahead must not change what it trains on.
        version = max(0, step - self.limits.max_staleness)
        tasks, self.queued = (
            self.queued[: self.limits.groups_per_step],
            self.queued[self.limits.groups_per_step :],
        )
        size = self.limits.group_size
        made = [[self.produce(t.task_id, m, version) for m in range(t.group_size or size)] for t in tasks]
        self.payloads |= {t.episode_id: t for group in made for t in group}
        self.steps[step] = [[t.episode_id for t in group] for group in made]
        self.most_held = max(self.most_held, len(self.payloads))

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        everything = self.payloads | self.spilled
        missing = [e for e in episode_ids if e not in everything]
        if missing:
            raise BadPayload(f"no payload of {missing[0]}")
        return [everything[e] for e in episode_ids]

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        return [get_fields(encode_trajectory(found), fields) for found in await self.read(episode_ids)]

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        self._maybe_crash(f"before:spill:{step}")
        if step >= self.version:
            raise StepError(f"spill of step {step}: version {step + 1} is not published")
        assert step >= self.committed, "no share is spilled after its commit"
        moved = {e: self.payloads.pop(e) for e in episode_ids if e in self.payloads}
        self.spilled |= moved
        self._maybe_crash(f"after:spill:{step}")
        return len(moved)

    async def publish_version(self, announcement: Announcement) -> bool:
        self._maybe_crash(f"before:publish:{announcement.version}")
        if announcement.version <= self.version:
            return False
        assert announcement.version == self.version + 1, "versions come in order"
        assert announcement.version - 1 in self.steps
        self.announced.append(announcement)
        self._maybe_crash(f"after:publish:{announcement.version}")
        return True

    async def renew_manifest(self, announcement: Announcement) -> bool:
        assert announcement.version == self.version
        self.renewed.append(announcement.version)
        self.announced[-1] = announcement
        return True

    async def latest_version(self) -> Announcement | None:
        return self.announced[-1] if self.announced and not self.forgetful else None

    async def latest_mark(self) -> AnnouncementMark | None:
        newest = await self.latest_version()
        return newest and AnnouncementMark(newest.version, "")

    async def commit(self, step: int, batches: Mapping[int, Sequence[Sequence[str]]] | None = None) -> None:
        self._maybe_crash(f"before:commit:{step}")
        assert step <= self.version, "only trained steps are committed"
        assert all(self.steps[known] == [list(g) for g in groups] for known, groups in (batches or {}).items())
        for old in range(self.committed, step):
            for group in self.steps[old]:
                for episode in group:
                    del (self.payloads if episode in self.payloads else self.spilled)[episode]
        self.committed = max(self.committed, step)
        self._maybe_crash(f"after:commit:{step}")

    async def rewind(self, step: int) -> int:
        assert step >= self.committed
        return sum(1 for recorded in self.steps if recorded >= step)

    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        return [make_trajectory(t.task_id, 0, t.min_version) for t in self.splits[split]], 0

    async def drop_split(self, split: str) -> None:
        self.splits[split] = []

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        key = f"{role}:{cause}"
        self.waits[key] = self.waits.get(key, 0.0) + seconds

    async def status(self) -> Status:
        shipped = sum(len(groups) for step, groups in self.steps.items() if step >= self.version)
        return Status(
            version=self.version,
            step=max(self.steps, default=-1) + 1,
            committed_step=self.committed,
            groups={"queued": len(self.queued), "shipped": shipped},
            episodes={},
            bytes=0,
            waits_s=self.waits,
            workers={},
            other_splits={split: {"queued": 0, "leased": 0, "done": len(t)} for split, t in self.splits.items()},
        )


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
    """A job of ten rows; `config`, `data` and `rollout` are settings of these sections."""
    limits = Limits(group_size=4, groups_per_step=2, max_staleness=changes.pop("max_staleness", 1))
    settings = {"steps": 6, "lr": 1e-3, "eps": 1e-4, "checkpoint_every": 2, "batch_timeout_s": 20.0, **(config or {})}
    values: dict[str, Any] = {
        "run": RunContext(queue or ScriptedQueue(limits), model, token),
        "config": TrainerConfig(**settings),
        "limits": limits,
        "run_dir": folder / "run",
        "weights_dir": folder / "weights",
        "data": DataConfig(**{"train": write_rows(folder / "train.jsonl"), **(data or {})}),
        "rollout": RolloutConfig(**(rollout or {})),
        **changes,
    }
    return TrainJob(**values)


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
    engine.begin_save(store.unfinished(step)).result(timeout=60)
    path: Path = store.seal(step, cursor, ranks.world, BATCHES).path
    return path
