"""The loop of `penstock sft`. One process per rank, started by torchrun or alone; the same steps on each.

    step s ─► rows of (seed, s) ─► pack ─► update ─► metrics.jsonl ─► every checkpoint_every: checkpoint
                                                                 └─► every eval_every: loss on the validation rows

Which rows a step trains follows from seed and step alone, and a checkpoint holds weights, moments and the state of
torch's generator: a run that was killed continues at the checkpoint's step, and on the same number of ranks comes to
the same bits. Checkpoints are written in the background and sealed by rank 0 between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from penstock.trainer.batch import Row, make_row, number_tokens
from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.rows import DataStream
from penstock.trainer.engine import update_speed
from penstock.trainer.engines import check_engine
from penstock.trainer.engines.fsdp.engine import FSDPEngine
from penstock.trainer.export import save_final_adapter, save_final_model
from penstock.trainer.job import BadJob, threads_here
from penstock.trainer.logprobs import Outputs
from penstock.trainer.packing import Pack, pack_rows
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.sft.config import SftConfig
from penstock.trainer.sft.conversations import ConversationFile
from penstock.trainer.sinks import SINKS, SinkJob
from penstock.trainer.sinks.async_sink import open_sinks
from penstock.trainer.state.checkpoint import (
    CheckpointFailed,
    CheckpointStore,
    NotSaved,
    failed_save,
    save_timeout_s,
)
from penstock.trainer.state.recorder import Records
from penstock.trainer.state.restore import newest_whole
from penstock.trainer.stopping import Stopping, TrainingDiverged
from penstock.transfer_queue import DataCursor

RANKS_TIMEOUT_S = 1800.0
"""One rank may load a model for so long while another waits for it."""
STOP_S = 25.0
"""For the step under way and the last checkpoint, after a cancellation."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SftJob:
    """The job of a rank; the same on all ranks."""

    model: str
    config: TrainerConfig
    """The recipe's; what its algorithm needs is left out, and `steps` is the number of steps."""
    sft: SftConfig
    run_dir: Path
    train: Path
    """A file of `write_conversations`."""
    validation: Path | None = None
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The resolved recipe as plain data, for sinks that show it."""


async def fine_tune(job: SftJob) -> None:
    """Trains to the last step, resuming where an earlier call stopped, and writes the model.

    Cancelled, it finishes the step under way, saves and raises `CancelledError`, or `NotSaved` if the checkpoint
    failed. Raises `BadJob`, `BadBatch`, `TrainingDiverged`, `CheckpointFailed`.
    """
    stop, in_torch = threading.Event(), TorchThread(threads_here(job.config))
    running = asyncio.ensure_future(in_torch(_fine_tune, job, stop.is_set))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        stop_s = STOP_S if job.config.stop_grace_s is None else job.config.stop_grace_s
        _, late = await asyncio.wait({running}, timeout=stop_s)
        if late:
            logger.error("not stopped within %.0f s; what was not saved is trained again", stop_s)
        else:
            try:
                running.result()
            except CheckpointFailed as error:
                raise NotSaved(str(error)) from error
        raise
    finally:
        in_torch.close()


def _fine_tune(job: SftJob, stopped: Callable[[], bool]) -> None:
    if job.config.engine != "fsdp":
        raise BadJob(f"trainer.engine is {job.config.engine}: `penstock sft` trains with fsdp alone; set it to fsdp")
    check_engine(job.config)
    for sink in job.config.sinks:
        SINKS.get(sink)
    ranks = Ranks.open(RANKS_TIMEOUT_S, job.config.parallel.layout)
    try:
        tuning = FineTuning(job, ranks)
        try:
            tuning.run(stopped)
        finally:
            tuning.close()
    finally:
        ranks.close()


class FineTuning:
    """One rank's share of the work."""

    def __init__(self, job: SftJob, ranks: Ranks) -> None:
        self._job, self._ranks = job, ranks
        self._config = settings_of(job)
        self._train = ConversationFile(job.train)
        self._validation = ConversationFile(job.validation) if job.validation else None
        self._order = DataStream(len(self._train), job.seed, shuffle=True)
        self._engine = FSDPEngine(job.model, self._config, ranks)
        self._checkpoints = SftCheckpoints(job, self._engine, ranks)
        self._bad_steps = 0
        self._records: Records | None = None
        if ranks.is_rank0:
            sinks = open_sinks(self._config.sinks, SinkJob(job.run_dir, job.settings))
            self._records = Records(job.run_dir, Stopping(self._config.stop), sinks)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until the last step, or until any rank receives a stop."""
        began = self._checkpoints.restore()
        if self._records is not None:
            self._records.rewind(began)
        if began == 0:
            self._validate(0)
        why = ""
        for step in range(began, self._config.steps):
            if self._config.stop.enabled:
                verdict = self._records.why_over() if self._records is not None else None
                why = str(self._ranks.from_rank0(verdict or ""))
                if why:
                    break
            if self._ranks.any(stopped()):
                self._checkpoints.save(step)
                self._checkpoints.settle()
                return
            self._step(step)
            self._after(step + 1)
        done = self._checkpoints.step_done
        self._checkpoints.save(done)
        self._checkpoints.settle()
        self._finish(done, why)

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    # one step ------------------------------------------------------------------------------------------------------
    def _step(self, step: int) -> None:
        began = time.monotonic()
        chosen = rows_of_step(self._order, step, self._job.sft.batch, len(self._train))
        rows = self._rows(self._train, chosen)
        packs = self._packs(rows)
        of_rows = [len(row.ids) for row in rows], [len(row.targets) for row in rows]
        of_packs = [len(pack.ids) for pack in packs], [pack.tokens_squared for pack in packs]
        sums = (int(self._ranks.data.sum(sum(part))) for part in (*of_rows, *of_packs))
        tokens, trained, computed, squares = sums
        update = self._engine.update(packs, negative_log_likelihood, trained, step)
        self._bad_steps = self._bad_steps + 1 if update.skipped else 0  # all ranks count the same
        if update.skipped:
            problem = (
                f"step {step}: loss {update.loss}, gradient norm {update.grad_norm}: not finite, the step is skipped"
            )
            if self._bad_steps > self._config.max_bad_steps:
                raise TrainingDiverged(
                    f"{problem}; {self._bad_steps} in a row (trainer.max_bad_steps is {self._config.max_bad_steps}). "
                    "Lower sft.lr, or start from a checkpoint"
                )
            logger.error("%s", problem)
        self._checkpoints.step_done = step + 1
        if self._records is None:
            return
        wall_s = time.monotonic() - began
        metrics = {
            "step": step,
            "version": step + 1,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "updates_skipped": int(update.skipped),
            "epoch": (step + 1) * self._job.sft.batch / len(self._train),
            "conversations": len(chosen),
            "tokens": tokens,
            "tokens_trained": trained,
            "prefix_tokens_saved": tokens - computed,
            "wall_s": wall_s,
            "tokens_per_s": tokens / max(wall_s, 1e-9),
            "checkpoints_damaged": self._checkpoints.damaged,
        }
        speed = update_speed(self._engine.flops, self._config, self._ranks, (computed, trained, squares), wall_s)
        self._records.metrics(step + 1, metrics | speed)

    def _rows(self, file: ConversationFile, numbers: Sequence[int]) -> list[Row]:
        """This rank's share of them."""
        mine = numbers[self._ranks.data.rank :: self._ranks.data.world]
        rows = [
            make_row(place, file.segment(number), f"conversation {number}", step=0, bound=0, model=self._engine.limits)
            for place, number in enumerate(mine)
        ]
        return number_tokens(rows)

    # between steps -------------------------------------------------------------------------------------------------
    def _after(self, version: int) -> None:
        """Validation and checkpoint, if they are due."""
        self._checkpoints.look()
        every = self._job.sft.eval_every
        if (every and version % every == 0) or version == self._config.steps:
            self._validate(version)
        if version % self._config.checkpoint_every == 0:
            self._checkpoints.save(version)

    def _packs(self, rows: Sequence[Row]) -> list[Pack]:
        share, layout = self._engine.shares_prefixes, self._engine.row_layout
        return pack_rows(rows, self._config.micro_batch_tokens, share=share, layout=layout)

    def _validate(self, version: int) -> None:
        """Mean negative log-likelihood of the validation's trained tokens, in nats."""
        if self._validation is None:
            return
        began = time.monotonic()
        rows = self._rows(self._validation, range(len(self._validation)))
        packs = self._packs(rows)
        logprobs = self._engine.score(packs)
        total = self._ranks.data.sum(-sum(float(part.double().sum()) for part in logprobs))
        tokens = self._ranks.data.sum(sum(len(row.targets) for row in rows))
        if self._records is not None:
            result = {"loss": total / tokens, "conversations": float(len(self._validation)), "tokens": tokens}
            self._records.evaluation(version, result, time.monotonic() - began)

    def _finish(self, version: int, why: str) -> None:
        folder = Path(self._job.sft.out or self._job.run_dir / "final_model")
        save_final_model(self._engine, self._ranks, self._job.model, folder)
        save_final_adapter(self._engine, self._ranks, self._job.run_dir / "final_adapter")
        if self._records is not None:
            self._records.ended(version, why or f"all {version} steps are trained")


def negative_log_likelihood(pack: Pack, outputs: Outputs) -> Tensor:
    return -outputs.logprobs.sum()


def settings_of(job: SftJob) -> TrainerConfig:
    """The recipe's trainer without its algorithm."""
    usual, sft = TrainerConfig(), job.sft
    return job.config.model_copy(
        update={
            "lr": sft.lr,
            "lr_schedule": sft.lr_schedule,
            "warmup_steps": math.ceil(0.05 * job.config.steps),
            "eps": sft.eps,
            "max_grad_norm": sft.max_grad_norm,
            "advantage": usual.advantage,
            "kl": usual.kl,
            "entropy_bonus": 0.0,
        }
    )


def rows_of_step(order: DataStream, step: int, batch: int, count: int) -> list[int]:
    """Numbers of the conversations of a step: epoch after epoch, each in an order from the seed."""
    places = (divmod(step * batch + index, count) for index in range(batch))
    return [order.row_index(DataCursor(epoch, index)) for epoch, index in places]


class SftCheckpoints:
    """Every rank has one; rank 0's seals. At most one checkpoint is under way."""

    def __init__(self, job: SftJob, engine: FSDPEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._store = CheckpointStore(job.run_dir / "checkpoints", job.config.keep_checkpoints)
        self._saving: tuple[int, Future[Any]] | None = None
        self._saved = -1
        self._nbytes = 0
        """Bytes of all ranks' parts of a checkpoint."""
        self._timeout_s = save_timeout_s(RANKS_TIMEOUT_S, engine.state_bytes)
        self.step_done = 0
        """Steps in the present weights."""

    @property
    def damaged(self) -> int:
        return self._store.damaged

    def restore(self) -> int:
        """Loads the newest whole checkpoint; the step to continue with. A collective."""
        largest = int(self._ranks.max(self._engine.state_bytes))
        self._nbytes = int(self._ranks.sum(self._engine.state_bytes))
        self._timeout_s = save_timeout_s(RANKS_TIMEOUT_S, largest)
        self._ranks.await_saves(self._timeout_s)
        if self._ranks.is_rank0:
            self._store.open()
        checkpoint = newest_whole(self._store, self._ranks)
        if checkpoint is None:
            return 0
        self._engine.load(checkpoint.path, checkpoint.ranks)
        self._saved = self.step_done = checkpoint.step
        logger.info("restored %s: step %d", checkpoint.path.name, checkpoint.step)
        return checkpoint.step

    def save(self, step: int) -> None:
        """Begins to save the state after `step` steps, unless it is saved already. A collective."""
        if step == self._saved:
            return
        self.settle()
        self._saved = step
        with self._failure_named(step):
            self._saving = step, self._engine.begin_save(self._store.unfinished(step))

    def look(self) -> None:
        """Seals what is written. Not a collective."""
        if self._saving is not None and self._saving[1].done():
            self.settle()

    def settle(self) -> None:
        """Waits for the checkpoint under way. Raises `CheckpointFailed`."""
        if self._saving is None:
            return
        (step, future), self._saving = self._saving, None
        with self._failure_named(step):
            future.result(self._timeout_s)
            if self._ranks.is_rank0:
                self._store.seal(step, DataCursor(), self._ranks.world, {})

    @contextmanager
    def _failure_named(self, step: int) -> Iterator[None]:
        """Raises `CheckpointFailed` for what fails in the block."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            folder, is_rank0 = self._store.unfinished(step), self._ranks.is_rank0
            raise failed_save(folder, self._nbytes, error, removes=is_rank0) from error
