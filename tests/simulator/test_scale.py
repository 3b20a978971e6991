"""The arithmetic of docs/how/scale.md, and the pages themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.simulator.hardware import MODELS, Machine, Model, gradient_exchange_s, token_s, token_s_per_sequence
from benchmarks.simulator.page import tables_in
from benchmarks.simulator.rates import MEASURED, PLAN_INPUTS
from benchmarks.simulator.scale import (
    MAX_STALENESS,
    PLANS,
    TABLES,
    from_trainer_s,
    http_s,
    queue_bytes_held,
    queue_bytes_per_s,
    queue_operations_per_s,
    setup,
)

ROOT = Path(__file__).parents[2]
SCALE, _, SIMULATOR = (ROOT / "docs/how/scale.md").read_text().partition("\n## Simulate a cluster")
MEASURED_TABLES = {"weights", "rates", "layouts"}
"""Layouts follow from sizes alone."""
RESTS_ON_INPUTS = {"steps", "queue", "weights_cited", "inputs"}
TRANSPORTS = re.findall(
    r'"(\w+)"', re.findall(r"TRANSPORTS: .* = \((.*)\)", (ROOT / "benchmarks/weights.py").read_text())[0]
)
ROUND = Machine(flops=1e12, memory_bytes_per_s=1e9, network_bytes_per_s=1e8, host_bytes_per_s=1e8)
TINY = Model(parameters=1e6, active=5e5, kv_bytes_per_token=100)


@pytest.mark.parametrize("name", TABLES)
def test_the_pages_have_the_tables_as_they_come_out(name: str) -> None:
    """`python -m benchmarks.simulator.page docs/how/scale.md` writes them."""
    assert (tables_in(SCALE) | tables_in(SIMULATOR))[name] == "\n".join(TABLES[name]())


def test_a_rate_is_measured_here_or_an_input_of_a_plan() -> None:
    """The key of a measured one is a figure that the benchmark makes. The page's first half rests on these alone; what
    rests on inputs is below "Simulate a cluster", where its caption says so."""
    made = "".join((ROOT / "benchmarks" / name).read_text() for name in ("weights.py", "support/broadcasts.py"))
    for rate in MEASURED.values():
        figure = rate.key.rpartition(".")[2]
        assert figure in made or figure.partition("_")[0] in TRANSPORTS, rate.key
        assert rate.key in SCALE
    assert not MEASURED.keys() & PLAN_INPUTS.keys()
    assert tables_in(SCALE).keys() == MEASURED_TABLES
    assert tables_in(SIMULATOR).keys() == RESTS_ON_INPUTS | {"published", "local"}
    for name in RESTS_ON_INPUTS:
        caption = SIMULATOR[: SIMULATOR.index(f"<!-- table: {name} -->")].strip().rpartition("\n\n")[2]
        assert "**not measured here**" in caption, f"the caption of {name}"


def test_decoding_reads_active_weights_once_and_each_sequences_cache() -> None:
    assert token_s(TINY, ROUND, gpus=2) == pytest.approx(1e6 / 2e9)
    assert token_s_per_sequence(TINY, ROUND, gpus=1, context=1000) == pytest.approx(1e6 / 1e12 + 1e5 / 1e9)


def test_gradients_cross_the_network_nearly_twice_and_not_at_all_for_one_copy() -> None:
    assert gradient_exchange_s(TINY, ROUND, shards=2, ranks_gpus=8) == pytest.approx(2 * 3 / 4 * 4e6 / 2 / 1e8)
    assert gradient_exchange_s(TINY, ROUND, shards=8, ranks_gpus=8) == 0


def test_files_that_are_handed_on_double_each_round() -> None:
    """1 server: 1 round; 3: the trainer and the first serve two in the second; 7: three rounds."""
    model = MODELS["Qwen2.5-7B"]
    one_copy_s = model.bytes / MEASURED["http_full"].bytes_per_s
    assert [http_s(model, n) / one_copy_s for n in (1, 2, 3, 4, 7, 8)] == pytest.approx([1, 2, 2, 3, 3, 4])
    assert from_trainer_s(model, 7) == pytest.approx(7 * one_copy_s)


def test_the_queues_operations_are_counted_per_episode_and_turn() -> None:
    config = setup(PLANS[0])
    episodes = config.group_size * config.groups_per_step
    calls = episodes * (2 + 2 * config.work.turns) + config.groups_per_step + 4
    assert queue_operations_per_s(config, step_s=10.0) == pytest.approx(calls / 10)
    assert queue_bytes_held(config) == pytest.approx(
        (MAX_STALENESS + 1) * 10.0 / 2 * queue_bytes_per_s(config, step_s=10.0)
    )
