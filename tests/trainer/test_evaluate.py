"""What an evaluation says about itself."""

from __future__ import annotations

from unittest.mock import ANY, MagicMock

from trainer_support import make_trajectory

from penstock.testing import MemoryTransferQueue
from penstock.trainer import DatasetRow
from penstock.trainer.evaluate import Evaluator, by_version
from penstock.transfer_queue import Limits


def test_one_version_sampled_all() -> None:
    made = [make_trajectory("eval/3/0", member, 3) for member in range(3)]
    assert by_version(made, 3) == {"version_oldest": 3.0, "version_newest": 3.0, "own_tokens": 1.0}


def test_servers_went_on_meanwhile() -> None:
    """One segment: of its two sampled runs the second is of version 4."""
    made = make_trajectory("eval/3/0", 0, 3)
    (segment,) = made.segments
    segment.version_spans[1, 0] = 4
    first, second = (int(end - start) for _, start, end in segment.version_spans)
    found = by_version([made], 3)
    assert found == {"version_oldest": 3.0, "version_newest": 4.0, "own_tokens": first / (first + second)}


def test_nothing_was_sampled() -> None:
    assert by_version([], 3) == {}


async def test_evaluate_stuck_one_lets_the_next_start() -> None:
    queue, recorder = MemoryTransferQueue(), MagicMock()
    await queue.create_run(Limits(2, 1, 0), "")
    row = DatasetRow([{"role": "user", "content": "?"}], "test", "1", None, {})
    evaluator = Evaluator(queue, [row], recorder, idle_timeout_s=0.05)
    assert evaluator.start(1)
    assert not evaluator.start(2)
    await evaluator.settle()  # no worker takes the episode
    assert evaluator.start(2)
    await evaluator.close()
    recorder.evaluation.assert_called_once_with(1, {"episodes": 0.0, "failed": 1.0}, ANY)
