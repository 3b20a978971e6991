"""A trainer that is told to stop gives up the step under way on all ranks, or finishes it on all."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from stopped_ranks import AT, TOLD
from trainer_support import assert_weights, check_accounts, final_weights, lines, make_job, run_ranks, task_name

from penstock.trainer import train
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.ranks.preemption import Preemption, StepAbandoned

pytestmark = pytest.mark.torch
STEPS = 6


def test_a_step_is_given_up_only_before_weights_change(ranks: Any) -> None:
    told = False
    preemption = ranks.own(Preemption)
    preemption.begin_step()
    told = True
    preemption.check()  # nobody listens
    preemption.listen(lambda: told)
    preemption.check()  # no step is under way
    preemption.begin_step()
    random = torch.rand(3)
    with pytest.raises(StepAbandoned):
        preemption.check()
    assert torch.equal(torch.rand(3), random), "the generator is as before the step"
    preemption.check()
    preemption.begin_step()
    preemption.weights_change()
    preemption.check()


PACKS: dict[str, Any] = {"micro_batch_tokens": 24, "minibatches": 2}
"""Each of the two updates of a step has several packs."""


class MiddleOfAnUpdate:
    """Holds the torch thread in the second pack of one update of step 3, until `go_on`."""

    def __init__(self, number: int) -> None:
        self._number, self._reached, self._go_on = number, threading.Event(), threading.Event()
        self.packs = [0, 0]
        """Of each update of the step that were trained."""

    def update(self, engine: FSDPEngine, packs: Any, loss: Any, divisor: float, step: int) -> Any:
        number = 1 if self.packs[0] else 0

        def watched(pack: Any, outputs: Any) -> torch.Tensor:
            self.packs[number] += 1
            if number == self._number and self.packs[number] == 2:
                self._reached.set()
                assert self._go_on.wait(200)
            return loss(pack, outputs)

        return FSDP_UPDATE(engine, packs, watched if step == 3 else loss, divisor, step)

    async def cancel_there(self, running: asyncio.Task[None]) -> None:
        assert await asyncio.to_thread(self._reached.wait, 200)
        running.cancel()
        for _ in range(20):  # lets the event loop deliver the cancellation before the update continues
            await asyncio.sleep(0)
        self._go_on.set()


FSDP_UPDATE = FSDPEngine.update


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> dict[str, torch.Tensor]:
    """Final weights of an uninterrupted run with `PACKS`."""
    job = make_job(tmp_path_factory.mktemp("packed"), tiny_model, PACKS)
    asyncio.run(train(job))
    return final_weights(job)


@pytest.mark.parametrize(("update", "kept"), [(0, 3), (1, 4)], ids=["before the first update", "before the second"])
async def test_told_to_stop_a_step_is_given_up_unless_weights_have_changed(
    update: int,
    kept: int,
    tmp_path: Path,
    tiny_model: str,
    packed: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next life trains the batch exactly once, and ends with the weights of an uninterrupted run."""
    job = make_job(tmp_path, tiny_model, {**PACKS, "checkpoint_every": 100})
    middle = MiddleOfAnUpdate(update)

    def watched(engine: FSDPEngine, *arguments: Any) -> Any:
        return middle.update(engine, *arguments)

    monkeypatch.setattr(FSDPEngine, "update", watched)
    running = asyncio.create_task(train(job))
    await middle.cancel_there(running)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert middle.packs == [2, 0] if kept == 3 else middle.packs[1] > 2
    assert (job.run.queue.version, job.run.queue.committed) == (kept, kept)
    assert (job.run_dir / "checkpoints" / f"step_{kept:08d}" / "complete").exists()
    assert [line["step"] for line in lines(job, "metrics.jsonl")] == list(range(kept))
    monkeypatch.undo()
    await train(job)
    await check_accounts(job)
    assert_weights(job, packed)


@pytest.mark.deep
def test_one_of_two_ranks_is_told_in_the_middle_of_a_step_and_both_give_it_up(tmp_path: Path, tiny_model: str) -> None:
    run_ranks("stopped_ranks.py", tmp_path, tiny_model)
    said = [json.loads((tmp_path / f"said_{rank}").read_text()) for rank in range(2)]
    assert said[TOLD]["first"] == "cancelled"
    assert [one["packs"] for one in said] == [2, 2], "no pack was trained after the one in which it was told"
    assert said[0]["stopped"] == [AT, AT], "version and committed step of the step before"
    assert (tmp_path / "stopped" / "run" / "checkpoints" / f"step_{AT:08d}").exists()
    assert (said[0]["second"], said[0]["done"]) == ("returned", [STEPS, STEPS])
    steps = [json.loads(line) for line in (tmp_path / "stopped" / "run" / "steps.jsonl").read_text().splitlines()]
    assert sorted(e for step in steps for e in step["episodes"]) == sorted(
        f"{task_name(n)}#{member}" for n in range(2 * STEPS) for member in range(4)
    )
    undisturbed, stopped = (
        load_file(tmp_path / name / "run" / "final_model" / "model.safetensors") for name in ("undisturbed", "stopped")
    )
    assert all(torch.equal(stopped[name], tensor) for name, tensor in undisturbed.items())
