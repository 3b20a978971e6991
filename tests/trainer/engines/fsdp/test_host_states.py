"""States that leave their device between steps come back bit for bit; a run that shares its devices is the same run."""

from __future__ import annotations

import asyncio
import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_support import ProducingQueue, assert_weights, final_weights, make_job

from penstock.trainer import train
from penstock.trainer.engines.fsdp import host_states
from penstock.trainer.engines.fsdp.host_states import HostStates
from penstock.transfer_queue import Limits, OverBudget, TurnCall, TurnReport, Turns, TurnSettings

pytestmark = pytest.mark.torch
LIMITS = Limits(group_size=4, groups_per_step=2, max_staleness=1)


def test_storages_are_freed_and_come_back_in_place() -> None:
    base = torch.randn(3, 5)
    tensors = [base, base[1:], torch.randn(7, dtype=torch.bfloat16), torch.zeros(0)]
    before, place = [one.clone() for one in tensors], tensors[1].storage_offset()
    states = HostStates(lambda: tensors, torch.device("cpu"))
    assert states.on_device == 3 * 5 * 4 + 7 * 2
    for _ in range(2):
        states.move_to_host()
        states.move_to_host()
        assert states.on_device == 0
        states.move_back()
        assert all(torch.equal(one, was) for one, was in zip(tensors, before, strict=True))
    assert tensors[1].storage_offset() == place
    tensors[0][1, 0] = 42.0
    assert tensors[1][0, 0] == 42.0


def test_tensors_of_another_device_stay() -> None:
    here = torch.ones(4)
    states = HostStates(lambda: [here], torch.device("meta"))
    states.move_to_host()
    assert torch.equal(here, torch.ones(4))


def test_moments_are_on_the_device_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake CUDA tensors: AdamW refuses operands of two devices, and nothing is computed."""
    monkeypatch.setattr(host_states, "PART_BYTES", 2 * 4 * 100)
    monkeypatch.setattr(host_states, "pinned", lambda sizes, _: [torch.empty(n, dtype=torch.uint8) for n in sizes])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [torch.nn.Parameter(torch.ones(40, device="cuda")) for _ in range(7)]
        optimizer = host_states.HostAdamW(parameters, fused=True)
        most = 0

        def count(*_: Any) -> None:
            nonlocal most
            states = [one for state in optimizer.state.values() for one in state.values()]
            most = max(most, sum(one.nbytes for one in states if one.device.type == "cuda" and one.numel() > 1))

        monkeypatch.setattr(torch.optim.AdamW, "step", counted(torch.optim.AdamW.step, count))
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones(40, device="cuda")
            optimizer.step()
            assert len(optimizer.state) == len(optimizer.param_groups[0]["params"]) == 7
            devices = {one.device.type for state in optimizer.state.values() for one in state.values()}
            assert devices == {"cpu"}
        assert most == 3 * 40 * 4 * 2, "three parameters reach the limit"


def counted(step: Any, count: Any) -> Any:
    def after(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        count()

    return after


def _bounds(line: str) -> tuple[int, int]:
    start, end = line.split(maxsplit=1)[0].split("-")
    return int(start, 16), int(end, 16)


class Runtime:
    """CUDA's, as far as it locks pages."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Of pages that are mapped still: as the device's, it knows no others."""
        assert any(address in range(*_bounds(line)) for line in Path("/proc/self/maps").read_text().splitlines())
        del self.locked[address]
        return 0


def test_pinned_memory_is_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    places = host_states.pinned([5 << 20, 3, 0], torch.device("cuda"))
    assert [place.nbytes for place in places] == [5 << 20, 3, 0]
    assert places[1].data_ptr() == places[0].data_ptr() + (5 << 20)
    assert list(runtime.locked.values()) == [(5 << 20) + 64]
    del places
    assert not runtime.locked


class SharingQueue(ProducingQueue):
    """With turns, and an engine that takes the devices whenever it can, for `BUSY` calls at a time."""

    BUSY = 2

    def __init__(self, budget: int) -> None:
        super().__init__(LIMITS)
        self.budget = budget
        self._busy = self._number = 0

    async def take_turn(self, call: TurnCall) -> Turns:
        self._of_engine(holds=False)
        found = self._turns.take(call)
        if not call.holds:
            self._busy = self.BUSY
            self._of_engine(holds=True)
        return found

    def _of_engine(self, *, holds: bool) -> None:
        self._busy -= not holds
        if holds or self._busy <= 0:
            self._number += 1
            size = self.budget if holds else 0
            self._turns.take(TurnCall("engine", "e", self._number, holds, 60.0, size, size, self.budget))

    @property
    def of_trainer(self) -> list[TurnReport]:
        return [report for report in self._turns.reports if report.side == "trainer"]


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(exist_ok=True)
    return parent / name


CONFIGS: list[dict[str, Any]] = [
    {},
    {"advantage": "gae", "kl": {"in_loss": 0.01}, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "critic-reference-bfloat16"])
async def test_a_run_in_turns_is_the_run_alone(tmp_path: Path, tiny_model: str, config: dict[str, Any]) -> None:
    """The same weights bit for bit; nothing is on the devices while an engine is, with checkpoints and publishing."""
    alone = make_job(folder(tmp_path, "alone"), tiny_model, {"steps": 4, **config})
    await train(alone)
    budget = 64 << 20
    queue = SharingQueue(budget)
    turn = TurnSettings(budget, hand_over_s=60.0)
    shared = make_job(folder(tmp_path, "shared"), tiny_model, {"steps": 4, **config}, queue=queue, turn=turn)
    await train(shared)
    assert_weights(shared, final_weights(alone))
    states = max(report.bytes for report in queue.of_trainer[1:])
    assert 0 < max(report.used for report in queue.of_trainer) <= states
    assert all(report.used == 0 for report in queue.of_trainer if not report.holds)
    turns = groupby(queue.of_trainer, lambda report: report.holds)
    loaded, *fullest = (max(report.used for report in turn) for holds, turn in turns if holds)
    assert len(fullest) == 5, "four steps and the final model"
    assert min(fullest) > loaded, "gradients or moments are reported too, however short the turn is"
    assert all(report.total_bytes <= budget for report in queue._turns.reports)
    assert queue._waits["trainer:turn"] > 0


async def test_it_resumes_in_turns(tmp_path: Path, tiny_model: str) -> None:
    """A checkpoint that is being written while the states leave their device is whole."""
    alone = make_job(folder(tmp_path, "alone"), tiny_model, {"checkpoint_every": 1})
    await train(alone)
    queue, turn = SharingQueue(64 << 20), TurnSettings(64 << 20)
    first = make_job(
        folder(tmp_path, "shared"), tiny_model, {"steps": 3, "checkpoint_every": 1}, queue=queue, turn=turn
    )
    await train(first)
    second = make_job(folder(tmp_path, "shared"), tiny_model, {"checkpoint_every": 1}, queue=queue, turn=turn)
    await train(second)
    assert_weights(second, final_weights(alone))


async def test_only_the_thread_that_computes_reads_tensors(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is renewed from the event loop in the middle of steps, where a tensor may be half made."""
    measured: set[str] = set()
    on_device = HostStates.on_device.fget
    assert on_device is not None

    def spy(states: HostStates) -> int:
        measured.add(threading.current_thread().name.split("_")[0])
        return on_device(states)

    monkeypatch.setattr(HostStates, "on_device", property(spy))
    queue = SharingQueue(64 << 20)
    await train(make_job(tmp_path, tiny_model, {"steps": 2}, queue=queue, turn=TurnSettings(64 << 20)))
    assert measured == {"torch"}
    assert max(report.used for report in queue.of_trainer) > 0


async def test_states_over_the_budget_end_the_trainer(tmp_path: Path, tiny_model: str) -> None:
    queue = SharingQueue(1000)
    job = make_job(tmp_path, tiny_model, queue=queue, turn=TurnSettings(1000, ttl_s=0.5))
    with pytest.raises(OverBudget, match=r"placement\.memory_budget_bytes, 1000"):
        await asyncio.wait_for(train(job), 60)
