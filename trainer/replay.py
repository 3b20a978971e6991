"""Replay: steps of a run are trained again from a checkpoint and the archive, without queue, servers and workers.

    checkpoint after step FIRST (0: the model) ──► batches FIRST … LAST − 1 of the archive ──► weights, metrics.jsonl

With the run's own algorithm the weights are its own, bit for bit, on the same kind of machine. With another one, with
rewards that were computed again, or without some of the episodes, the batches were sampled by a policy that the
replayed one departs from: each step says how far, and the replay ends before one that no importance weight can correct.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.common import append_jsonl, iter_jsonl, write_atomically
from penstock.trainer.checks import check_job
from penstock.trainer.engine import Engine
from penstock.trainer.engines import ENGINES
from penstock.trainer.export import save_final_model
from penstock.trainer.job import BadJob, TrainJob, needs_of_advantage, threads_here
from penstock.trainer.learner import Learner, ScoredBatch
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.source import BatchSource
from penstock.trainer.state.checkpoint import read_whole

if TYPE_CHECKING:
    from penstock.transfer_queue import Archive

LEAST_SAMPLE_SHARE = 0.1
"""A replay ends before a step with a smaller effective sample share (Σw)² / (N · Σw²) of its tokens: of ten tokens
fewer than one counts, and the importance weights' variance is all that is learned."""
CHANGED_BY_RECORD = ("faults",)
"""Metrics that a run adds to after the update."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """The stretch FIRST … LAST − 1 of a run."""

    job: TrainJob
    """The replay's own job: its folder, and perhaps another algorithm or model. Its queue is not used."""
    of_run: TrainJob
    """The job of the run."""
    archive: Archive
    first: int
    last: int
    has_new_rewards: bool = False
    left_out: Collection[str] = frozenset()
    """Episodes that are not trained. A step without any other is no step: neither weights nor optimizer change."""

    @property
    def is_unchanged(self) -> bool:
        return self.job.config == self.of_run.config and not self.has_new_rewards and not self.left_out

    def batches(self) -> dict[int, list[list[str]]]:
        """Groups of each step that is trained; a group may be empty. Raises `BadPayload`."""
        stored = self.archive.batches(self.first, self.last)
        batches = {
            step: [[one for one in group if one not in self.left_out] for group in stored[step]]
            for step in sorted(stored)
        }
        return {step: groups for step, groups in batches.items() if any(groups)}

    @property
    def start(self) -> Path | None:
        """The checkpoint to begin with; None: the model. Raises `BadJob`."""
        is_other = self.job.run.model != self.of_run.run.model
        return None if is_other else checkpoint_before(self.of_run.run_dir / "checkpoints", self.first)


def check_replay(replay: ReplayJob) -> None:
    """Raises `BadJob` for a change that the archived batches cannot serve and for a start that is not there,
    `BadPayload` for steps that are not there, and what `check_job` raises."""
    job, before, _ = replay.job, replay.of_run.config, replay.start
    check_job(job)
    if not replay.first < replay.last:
        raise BadJob(f"--from {replay.first} --to {replay.last}: there is no step between them")
    replay.archive.batches(replay.first, replay.last)
    if replay.last > job.config.steps:
        raise BadJob(f"trainer.steps is {job.config.steps}, and --to {replay.last} is after them")
    if replay.is_unchanged:
        return
    if job.config.correction is None:
        raise BadJob(
            "trainer.correction is null, and the batches were sampled by the run's own policies: with another "
            "algorithm or other batches every step is off-policy. Set trainer.correction=truncated_is"
        )
    if "greedy" in needs_of_advantage(job.config) - needs_of_advantage(before):
        raise BadJob(f"trainer.advantage={job.config.advantage} needs a greedy episode per group; the run sampled none")
    if job.config.distill.enabled and not before.distill.enabled:
        raise BadJob("trainer.distill: the run had no teacher, so that its episodes have none of its logprobs")


def checkpoint_before(folder: Path, step: int) -> Path | None:
    """The checkpoint after `step` steps in a run's ``checkpoints``; None for step 0, the model. Raises `BadJob` naming
    the steps that can be replayed from."""
    if step == 0:
        return None
    path = folder / f"step_{step:08d}"
    if not path.is_dir():
        there = sorted(int(one.name.partition("_")[2]) for one in folder.glob("step_*") if not one.suffix)
        raise BadJob(f"--from {step}: no checkpoint is after that step; there are {', '.join(map(str, [0, *there]))}")
    return path


async def replay_steps(replay: ReplayJob) -> dict[str, Any]:
    """Train the stretch and write ``metrics.jsonl``, ``final_model`` and ``replay.json`` into `job.run_dir`; returns
    what ``replay.json`` has. A collective: every rank calls it. Raises `TrainingDiverged` and what `check_replay`
    raises.
    """
    check_replay(replay)
    job, start, checkpoints = replay.job, replay.start, replay.of_run.run_dir / "checkpoints"
    batches = replay.batches()
    async with AsyncExitStack() as stack:
        in_torch = TorchThread(threads_here(job.config))
        stack.callback(in_torch.close)
        ranks = await in_torch(Ranks.open, job.config.collective_timeout_s, job.config.parallel.layout)
        stack.push_async_callback(in_torch, ranks.close)
        engine = await in_torch(ENGINES.get(job.config.engine), job, ranks)
        if start is not None:
            await _load(start, engine, in_torch)
        source = BatchSource(
            replace(job, archive=replay.archive), None, engine.limits, ranks.data.rank, ranks.data.world
        )
        source.replays |= batches
        stack.push_async_callback(source.close)
        learner = Learner(job.config, engine, ranks.data, scores_first=not replay.is_unchanged)
        lines, refused = await _train(replay, in_torch, learner, source, ranks)
        last = replay.last if refused is None else refused.step
        result: dict[str, Any] = {"first": replay.first, "last": last, "refused": refused and refused.reason}
        result |= _summary(replay, lines)
        await in_torch(save_final_model, engine, ranks, job.run.model, job.run_dir / "final_model")
        if replay.is_unchanged and (end := checkpoints / f"step_{replay.last:08d}").is_dir():
            ours = await in_torch(weights_digest, engine)
            await _load(end, engine, in_torch)
            result["weights_equal"] = ours == await in_torch(weights_digest, engine)
        if ranks.is_rank0:
            write_atomically(job.run_dir / "replay.json", json.dumps(result) + "\n")
        return result


async def _load(checkpoint: Path, engine: Engine, in_torch: TorchThread) -> None:
    """Raises `BadJob` for a damaged checkpoint."""
    try:
        info = await asyncio.to_thread(read_whole, checkpoint)
    except (OSError, ValueError) as error:
        raise BadJob(f"{checkpoint} is damaged: {error}. Replay from another checkpoint") from error
    await in_torch(engine.load, info.path, info.ranks)


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A step before which the replay ended."""

    step: int
    reason: str


async def _train(
    replay: ReplayJob, in_torch: TorchThread, learner: Learner, source: BatchSource, ranks: Ranks
) -> tuple[list[dict[str, Any]], RefusedStep | None]:
    """A line of metrics per trained step, with ``equal``: None where the run has no line of it, or another algorithm.
    And the step that was refused, if any."""
    known = {line["step"]: line for line in iter_jsonl(replay.of_run.run_dir / "metrics.jsonl")}
    lines: list[dict[str, Any]] = []
    never, steps = asyncio.Event(), sorted(source.replays)
    for step, following in zip_longest(steps, steps[1:]):
        batch = await source.take(step, never)
        assert batch is not None
        if following is not None:
            source.prefetch(following)
        scored = await in_torch(learner.score, batch)
        share = 1.0 if replay.is_unchanged else await in_torch(sample_share, scored, ranks.data)
        if share < LEAST_SAMPLE_SHARE:
            reason = (
                f"step {step}: the effective sample share is {share:.3g}, below {LEAST_SAMPLE_SHARE}: the replayed "
                "policy is too far from the one that sampled the batch. Replay a shorter stretch, from a later "
                "checkpoint, or lower trainer.lr"
            )
            return lines, RefusedStep(step, reason)
        advantages = await in_torch(learner.advantages, batch, scored)
        metrics = await in_torch(learner.update, batch, scored, advantages)
        differing = differences(metrics, known[step]) if replay.is_unchanged and step in known else None
        line = {**metrics, "equal": None if differing is None else not differing}
        lines.append(line)
        if ranks.is_rank0:
            _say(line, differing or [])
            append_jsonl(replay.job.run_dir / "metrics.jsonl", [line])
    return lines, None


def sample_share(scored: ScoredBatch, ranks: Ranks) -> float:
    """The effective sample share of a batch whose logprobs were all scored. A collective."""
    packs = [pack for packs in scored.minibatches for pack in packs]
    ratios = [(pack.proximal - pack.behaviour)[pack.mask].double().exp() for pack in packs if pack.proximal is not None]
    sums = [
        sum(float(part) for part in parts) for parts in ([r.sum() for r in ratios], [r.square().sum() for r in ratios])
    ]
    tokens, total, squared = (ranks.sum(value) for value in (sum(len(r) for r in ratios), *sums))
    return total**2 / (tokens * squared) if squared else 1.0


def differences(metrics: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Names of metrics that are not, to the last bit, what the run recorded."""
    plain = json.loads(json.dumps(metrics))
    return [
        name
        for name, value in plain.items()
        if name not in CHANGED_BY_RECORD and json.dumps(value) != json.dumps(recorded.get(name))
    ]


def clip_share(line: Mapping[str, Any]) -> float:
    """The share of tokens whose ratio the loss has clipped, on either side."""
    return float(sum(value for name, value in line.items() if name.startswith("clip_fraction")))


def _say(line: Mapping[str, Any], differing: Sequence[str]) -> None:
    verdict = {None: "", True: "; as the run", False: f"; not as the run: {', '.join(differing[:5])}"}[line["equal"]]
    logger.info(
        "step %d: loss %.6g, effective sample share %.3f, clipped %.3f%s",
        line["step"],
        line["loss"],
        line["effective_sample_share"],
        clip_share(line),
        verdict,
    )


def _summary(replay: ReplayJob, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "changed": not replay.is_unchanged,
        "steps_trained": len(lines),
        "left_out": len(replay.left_out),
        "steps_equal": sum(line["equal"] is True for line in lines),
        "steps_different": sum(line["equal"] is False for line in lines),
        "weights_equal": None,
        "effective_sample_share_min": min((line["effective_sample_share"] for line in lines), default=None),
        "clip_share_max": max((clip_share(line) for line in lines), default=None),
    }


def weights_digest(engine: Engine) -> str:
    """SHA-256 of all tensors with their names, those that do not learn too. A collective."""
    digest = hashlib.sha256()
    for name, tensor in engine.gathered_weights():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
