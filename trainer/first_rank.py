"""What rank 0 alone has: the data's feeder, the recorder with its sinks, the evaluator."""

from __future__ import annotations

from penstock.trainer.algorithm import GREEDY_MEMBER, needs_of_advantage
from penstock.trainer.data import Stream, load_rows
from penstock.trainer.evaluate import Evaluator
from penstock.trainer.feeder import Feeder
from penstock.trainer.job import BadJob, TrainJob
from penstock.trainer.recorder import Recorder
from penstock.trainer.sinks import SINKS, MetricSink, SinkJob
from penstock.trainer.sinks.beside import Beside
from penstock.trainer.stopping import Stopping
from penstock.trainer.timeline import Timeline
from penstock.transfer_queue import QueueError, check_quotas


def first_rank_parts(job: TrainJob, timeline: Timeline) -> tuple[Feeder, Recorder, Evaluator]:
    """Raises `BadJob`, `DataError`: bad data is found before anything is changed in the queue."""
    rows = load_rows(job.train_data)
    try:
        check_quotas(job.limits, {row.data_source for row in rows})
    except QueueError as error:
        raise BadJob(f"{error} (dataset {job.train_data})") from error
    eval_rows = load_rows(job.eval_data, job.eval_limit) if job.eval_data else []
    stream = Stream(len(rows), job.seed, job.shuffle)
    sampling = {"greedy_member": GREEDY_MEMBER} if "greedy" in needs_of_advantage(job.config) else None
    feeder = Feeder(job.queue, job.limits, rows, stream, job.config.steps, sampling=sampling)
    stopping, sinks = Stopping(job.config.stop), [*job.watchers, *_sinks(job)]
    recorder = Recorder(job.run_dir, job.model, job.config.save_trajectories, stopping, sinks)
    return feeder, recorder, Evaluator(job.queue, eval_rows, recorder, timeline)


def _sinks(job: TrainJob) -> list[MetricSink]:
    """Those that the recipe names; the recorder has ``jsonl`` by itself."""
    told = SinkJob(job.run_dir, job.settings)
    names = [name for name in dict.fromkeys(job.config.sinks) if name != "jsonl"]
    return [Beside(name, SINKS.get(name), told) for name in names]
