"""Every benchmark runs to its end and prints what it promises. Figures are not judged here: this machine is shared."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import skip_without

from benchmarks.simulator.scale import MEASURED
from benchmarks.support.sides import transferqueue_python

Measure = Callable[..., Awaitable[dict[str, Any]]]
redis = pytest.mark.redis
QUEUE = {
    "PENSTOCK_BENCH_ROUNDS": "1",
    "PENSTOCK_BENCH_SIZES": "1mb",
    "PENSTOCK_BENCH_PRODUCERS": "1,2",
    "PENSTOCK_BENCH_MAX_QUEUED": "2000",
}
TINY = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_MODEL": "tiny", "PENSTOCK_BENCH_DTYPE": "float32"}
WEIGHTS = {**TINY, "PENSTOCK_BENCH_WEIGHTS_MB": "8", "PENSTOCK_BENCH_UPDATES": "3", "PENSTOCK_BENCH_SWAPS": "4"}


@redis
@pytest.mark.deep
async def test_queue_without_transferqueue_names_how_to_install_it(measure: Measure) -> None:
    measured = await measure("queue", **QUEUE, PENSTOCK_BENCH_PYTHON="")
    ratios, figures = measured["ratio"], measured["figures"]
    sides = {f"ledger_over_raw_redis_1mb{more}" for more in ("", "_2_producers")}
    assert {*sides, "index_p99_1m_over_1k"} <= set(ratios)
    assert all(value > 0 for value in ratios.values())
    assert not any("transferqueue" in name for name in [*ratios, *figures])
    assert "setup-bench" in measured["setup"]["transferqueue"]
    for side in ("raw_redis", "ledger"):
        cell = figures[side]["1mb"]["2_producers"]
        assert cell["mb_per_s"] > 0
        assert cell["put_p50_us"] <= cell["put_p99_us"]
        assert {"redis-server", "store_child", "store_child 2", "store_child 3"} == set(cell["peak_rss_mb"])
        assert cell["peak_rss_mb"]["redis-server"] > 32, "at least the payloads of the round"
    index = figures["index"]
    assert list(index) == ["1k", "100k", "1m"]
    for operation in ("lease_episodes", "journal", "complete", "lease_batch", "status", "renew"):
        assert index["1m"][operation]["p50_us"] <= index["1m"][operation]["p99_us"]


@redis
@pytest.mark.deep
@pytest.mark.skipif(transferqueue_python() is None, reason="TransferQueue is not installed: scripts/setup-bench")
async def test_queue_with_transferqueue_has_its_sides(measure: Measure) -> None:
    measured = await measure("queue", **QUEUE)
    for pair in ("ledger_over_transferqueue", "ledger_over_transferqueue_batched"):
        assert measured["ratio"][f"{pair}_1mb"] > 0
    peaks = measured["figures"]["transferqueue"]["1mb"]["2_producers"]["peak_rss_mb"]
    actors = {"ray::TransferQueueController", "ray::SimpleStorageUnit 2", "ray::Producer 2"}
    assert {"transferqueue_child", "raylet", "gcs_server"} | actors <= set(peaks)


async def test_tokens_has_a_cost_for_each_turn_and_side(measure: Measure) -> None:
    pytest.importorskip("transformers")
    short = {"PENSTOCK_BENCH_ROUNDS": "2", "PENSTOCK_BENCH_SAMPLES": "3", "PENSTOCK_BENCH_TURNS": "1,4,12"}
    measured = await measure("tokens", **short)
    figures, ratios = measured["figures"], measured["ratio"]
    for side in ("splice", "rerender"):
        assert set(figures[side]) == {"turn_1", "turn_4", "turn_12"}
        assert figures[side]["turn_4"]["p50_us"] <= figures[side]["turn_4"]["p90_us"]
        assert ratios[f"{side}_turn12_over_turn1"] > 0
    for turn in (1, 12):
        assert ratios[f"splice_over_rerender_turn{turn}"] > 0
    tokens = figures["context_tokens"]
    assert tokens["turn_1"] < tokens["turn_4"] < tokens["turn_12"]


@pytest.mark.deep
@pytest.mark.torch
@redis
@pytest.mark.timeout(900)
async def test_serve_has_a_step_of_each_side(measure: Measure) -> None:
    pytest.importorskip("torch")
    short = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_MODEL": "tiny", "PENSTOCK_BENCH_ROWS": "8"}
    measured = await measure("serve", **short)
    assert set(measured["figures"]) == {"direct_s", "service_s", "service_of_8_s", "samples_s", "samples_of_8_s"}
    assert set(measured["ratio"]) == {"steps_over_direct", "adapters_8_over_1", "samples_8_over_1"}
    assert all(value > 0 for value in measured["figures"].values())


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.bwrap
@redis
@pytest.mark.timeout(900)
async def test_archive_has_costs_and_a_replay_that_is_equal(measure: Measure) -> None:
    pytest.importorskip("torch")
    short = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_STEPS": "4", "PENSTOCK_BENCH_GROUPS": "2"}
    measured = await measure("archive", **short)
    figures = measured["figures"]
    assert figures["replay_bit_equal"] is True
    assert figures["forks"]
    assert [figures[f"forks_{name}"] for name in ("lost", "twice", "different", "left_behind")] == [0, 0, 0, []]
    assert {"archive_cpu_over_run", "archive_bytes_over_payload"} <= set(measured["ratio"])
    assert all(value > 0 for value in measured["ratio"].values())


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.bwrap
@redis
@pytest.mark.timeout(1800)
async def test_rescore_has_new_tokens_of_each_broken_reward(measure: Measure) -> None:
    pytest.importorskip("torch")
    measured = await measure("rescore", PENSTOCK_BENCH_STEPS="10", PENSTOCK_BENCH_GROUPS="2")
    figures = measured["figures"]
    assert figures["clean_tokens"] > 0
    for kind in ("silent", "lenient"):
        assert figures[kind]["steps_rescored"] > 0, "the first step was sampled by the model that is trained"
        assert f"{kind}_new_over_clean_tokens" in measured["ratio"]


async def test_http_has_a_ratio_for_each_client_and_kind_of_call(measure: Measure) -> None:
    short = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_ANSWERS": "4", "PENSTOCK_BENCH_CALLS": "8"}
    measured = await measure("http", **short)
    sides, kinds = ("httpx", "httpx_aiohttp"), ("stream", "call")
    assert set(measured["ratio"]) == {f"{kind}_{side}_over_aiohttp" for side in sides for kind in kinds}
    assert all(value > 0 for of in measured["figures"].values() for value in of.values())


@redis
@pytest.mark.deep
@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_rollout_has_client_and_bare_engine(measure: Measure) -> None:
    await skip_without("vllm")
    short = {**TINY, "PENSTOCK_BENCH_CONCURRENCY": "1,4", "PENSTOCK_BENCH_ANSWER_TOKENS": "16"}
    measured = await measure("rollout", **short, PENSTOCK_BENCH_ENGINE="vllm")
    figures, ratios = measured["figures"], measured["ratio"]
    assert set(figures["load"]) == {"1", "4"}
    for many, cell in figures["load"].items():
        assert ratios[f"tokens_over_bare_engine_{many}"] == cell["tokens_over_bare"] > 0
        assert ratios[f"cpu_over_bare_engine_{many}"] == cell["cpu_over_bare"] > 0
        for side in ("client", "bare"):
            one = cell[side]
            assert one["tokens_per_s_least"] <= one["tokens_per_s"] <= one["tokens_per_s_most"]
            assert 0 < one["first_p50_ms"] <= one["first_p99_ms"]
            assert one["client_cpu_s_per_1000"] > 0
            assert one["engine_cpu_s_per_1000"] > 0
        assert cell["client"]["sidecar_cpu_s_per_1000"] > 0
    assert set(figures["small_model"]) == {"4"}
    assert set(figures["sidecar_cpu_per_1000_tokens"]) == {"1", "4", "4_small_model"}
    assert min(figures["sidecar_cpu_per_1000_tokens"].values()) > 0


@redis
@pytest.mark.torch
@pytest.mark.deep
async def test_weights_has_deltas_fetches_and_broadcasts(measure: Measure) -> None:
    pytest.importorskip("transformers")
    measured = await measure("weights", **WEIGHTS, PENSTOCK_BENCH_ENGINE="")
    ratios = measured["ratio"]
    # Bytes do not depend on the machine.
    low, middle, high = (ratios[f"delta_bytes_over_full_{rate}"] for rate in ("1e-6", "1e-5", "1e-4"))
    assert low <= 0.10
    assert low < middle < high <= 1
    for transport in ("shm", "disk", "http"):
        for kind in ("full", "delta"):
            assert ratios[f"fetch_{transport}_{kind}_over_copy"] > 0
    assert not any("pause" in name for name in ratios)
    assert "worker_copy_over_model" not in ratios, "no engine was asked for"
    assert ratios["broadcast_over_raw_gloo"] > 0
    assert ratios["broadcast_of_two_ranks_over_raw_gloo"] > 0
    assert ratios["bytes_over_model"] <= 1.1, "each byte comes to a worker once"
    assert ratios["sender_share_max_over_mean"] <= 1.2, "every rank of the trainer sends its own bytes"
    assert ratios["host_peak_over_bucket"] <= 3, "buckets are counted, not timed"
    for rate in MEASURED.values():  # docs/how/scale.md has these
        _, part, name = rate.key.split(".")
        assert measured["figures"][part][name] > 0


@redis
@pytest.mark.torch
@pytest.mark.deep
async def test_weights_with_an_engine_has_its_pauses(measure: Measure) -> None:
    pytest.importorskip("transformers")
    measured = await measure("weights", **WEIGHTS, PENSTOCK_BENCH_ENGINE="hf")
    figures, ratios = measured["figures"]["pause"], measured["ratio"]
    assert figures["updates"] == 4
    assert 0 < figures["load_in_pause_s"]["p99"] <= figures["pause_s"]["p99"]
    assert figures["pause_s"]["p50"] <= figures["pause_s"]["p99"]
    assert 0 < figures["in_flight"] <= 8
    assert min(figures["others_tokens_per_s"].values()) > 0
    # A load is a part of its pause.
    assert 1 <= ratios["pause_p50_over_engine_load"] <= ratios["pause_p99_over_engine_load"]
    assert ratios["others_tokens_during_update"] > 0


@redis
@pytest.mark.deep
async def test_agents_has_cpu_and_bytes_of_each_level(measure: Measure) -> None:
    short = {"EPISODES_AT_ONCE": "10,40", "ROUNDS": "1", "SECONDS": "1", "TURNS_PER_S": "100"}
    measured = await measure("agents", **{f"PENSTOCK_BENCH_{name}": value for name, value in short.items()})
    assert set(measured["ratio"]) == {"cpu_per_turn_40_over_10"}
    assert measured["ratio"]["cpu_per_turn_40_over_10"] > 0
    figures = measured["figures"]
    for level in (10, 40):
        cell = figures[f"{level}_episodes"]
        assert cell["waiting"] >= 0.9 * level
        assert cell["turns"] > 0
        assert cell["cpu_ms_per_turn"] > 0
        assert cell["lag_p50_ms"] <= cell["lag_p99_ms"] <= cell["lag_most_ms"] + 0.1
        assert cell["context_tokens_per_episode"] > 100
    assert "bytes_per_idle_episode" in figures


BOXES = {"PENSTOCK_BENCH_ROUNDS": "1", "PENSTOCK_BENCH_SAMPLES": "1"}


@pytest.mark.parametrize(
    "backends",
    [
        pytest.param(["bwrap", "remote"], marks=pytest.mark.bwrap),
        pytest.param(["docker"], marks=pytest.mark.docker),
    ],
    ids=["bwrap", "docker"],
)
async def test_sandbox_compares_each_operation_with_a_bare_box(measure: Measure, backends: list[str]) -> None:
    measured = await measure("sandbox", **BOXES, PENSTOCK_BENCH_BACKENDS=",".join(backends))
    if "docker" in (missing := measured["setup"]["missing"]):
        pytest.skip(f"{missing['docker']} (scripts/setup-docker)")
    assert missing == {}
    operations = ("session_exec", "start", "exec", "boxes_per_s")
    assert set(measured["ratio"]) == {f"{name}_over_bare" for name in operations}
    for by_backend in measured["ratio"].values():
        assert list(by_backend) == backends
        assert all(value > 0 for value in by_backend.values())
    for figures in measured["figures"].values():
        assert 0 < figures["session_exec_p50_ms"] <= figures["session_exec_p99_ms"]
        assert 0 < figures["bare_exec_p50_ms"] <= figures["bare_exec_p99_ms"]


async def test_sandbox_names_a_backend_that_cannot_work_here(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    measured = await measure("sandbox", **BOXES, PENSTOCK_BENCH_BACKENDS="docker")
    assert "DOCKER_HOST" in measured["setup"]["missing"]["docker"]
    assert measured["ratio"]["session_exec_over_bare"] == measured["figures"] == {}


@redis
@pytest.mark.deep
async def test_a_benchmark_that_is_terminated_leaves_no_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = {"TMPDIR": str(tmp_path), "PENSTOCK_BENCH_UPDATES": "100000"}
    penstock = Path(sys.executable).with_name("penstock")
    process = await asyncio.create_subprocess_exec(
        penstock, "bench", "weights", env={**os.environ, **settings}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(500):
            while not list(tmp_path.glob("penstock-bench-*/*.safetensors")):
                await asyncio.sleep(0.05)
            process.terminate()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert status == 128 + signal.SIGTERM
    assert list(tmp_path.glob("penstock-*")) == []  # torch keeps a folder of its own
