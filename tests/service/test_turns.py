"""Turns of the owners of samples, at the servers' one adapter and at its places."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from service_parts import CONFIG, NAME

from penstock.rollout_server import RolloutConfig
from penstock.service import ServiceJob
from penstock.service.calls import Prompt, Sample, TextChunk
from penstock.service.job import outcome_of
from penstock.service.sampler import SampleRunner, Waiting, in_turns, next_adapter
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import ClientRequest, RunContext
from penstock.weight_sync import WeightsRefused

CALL = Sample(prompt=Prompt(chunks=[TextChunk(tokens=[1])]), sampling_session_id="s", seq_id=0)


def sample(name: str) -> Waiting:
    """`name`: the owner's letter and a number."""
    return name, ClientRequest(name[0], "sample", b"", "sampler:s", int(name[1:]), ordered=False), CALL


def test_a_place_goes_to_the_owner_who_has_the_fewest() -> None:
    waiting = [sample(name) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
    assert [name for name, _, _ in in_turns(waiting, ["a", "a", "c"])] == ["b1", "c1", "b2", "a1", "a2", "a3"]


def test_the_next_adapter_is_the_first_of_the_owner_whose_turn_is_longest_ago() -> None:
    waiting: dict[str | None, list[Waiting]] = {
        "of a": [sample("a1")],
        "of a too": [sample("a2")],
        "of b": [sample("b1")],
    }
    assert next_adapter(waiting, {}) == "of a"
    assert next_adapter(waiting, {"a": 2.0}) == "of b"
    assert next_adapter(waiting, {"a": 2.0, "b": 1.0}) == "of b"
    assert next_adapter({**waiting, None: [sample("b2"), sample("c1")]}, {"a": 2.0, "b": 1.0}) is None


@pytest.mark.torch
async def test_samples_fail_if_no_adapter_can_be_added_to_the_base_model(tiny_model: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run, nothing = RunContext(MemoryTransferQueue(), tiny_model), Any
    job = ServiceJob(run, CONFIG, RolloutConfig(), tmp_path, tmp_path / "weights", NAME)
    samples = SampleRunner(job, *[nothing] * 3)
    samples._mount = AsyncMock(side_effect=WeightsRefused("the folder has no safetensors"))  # type: ignore[method-assign]
    samples._finish = AsyncMock()  # type: ignore[method-assign]
    samples._waiting = {"a": [sample("a1")]}
    await samples._serve("a")
    request, result = samples._finish.await_args.args
    assert (request, outcome_of(result)) == ("a1", "server")
    assert b"no safetensors" in result.data
