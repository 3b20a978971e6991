"""Tokens through sidecar and client, compared with the bare engine.

    penstock bench rollout --json

    client   load generator ─► RolloutClient ─► sidecar ─► engine
    bare     load generator ───────────────────────────► the same engine process, over its own streaming route

Both generators are processes that parse every id and logprob. In each round both sides have the same load once, in
changing order. A small model follows, whose engine is quick, so that HTTP is what counts.

Environment: PENSTOCK_BENCH_ENGINE (vllm; sglang), PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_MODEL (56m; a name of
`support.model.SIZES` or a model folder), PENSTOCK_BENCH_DTYPE (bfloat16), PENSTOCK_BENCH_CONCURRENCY (1,16,64,256),
PENSTOCK_BENCH_ANSWER_TOKENS (64; a quarter of it at 256), PENSTOCK_BENCH_ENGINE_ARGS (further flags of it, JSON).
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.support.comparison import say
from benchmarks.support.engine_load import EngineSide, measure_levels
from benchmarks.support.load import Load
from benchmarks.support.measure import processor
from benchmarks.support.model import SIZES, save_model
from benchmarks.support.rollout_run import engine_args, load_process, redis_host, rollout_servers

SMALL = "2m"
SMALL_LEVEL = 64
PROMPT_TOKENS = 32
CONTEXT = 1024


@dataclass(frozen=True)
class RolloutExtent:
    """How much is measured, from the environment."""

    engine: str
    rounds: int
    model: str
    dtype: str
    concurrency: list[int]
    answer_tokens: int

    @classmethod
    def read(cls) -> RolloutExtent:
        many = os.environ.get("PENSTOCK_BENCH_CONCURRENCY", "1,16,64,256").split(",")
        return cls(
            os.environ.get("PENSTOCK_BENCH_ENGINE", "vllm"),
            int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "5")),
            os.environ.get("PENSTOCK_BENCH_MODEL", "56m"),
            os.environ.get("PENSTOCK_BENCH_DTYPE", "bfloat16"),
            [int(number) for number in many],
            int(os.environ.get("PENSTOCK_BENCH_ANSWER_TOKENS", "64")),
        )

    def rollout(self) -> dict[str, Any]:
        """The recipe's settings of the servers."""
        most = max(self.concurrency)
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "max_model_len": CONTEXT,
            # One more: the sidecar probes an engine that it believes idle, also while the bare side loads it.
            "max_concurrent": most + 1,
            "kv_cache_tokens": 2 * CONTEXT + 2 * most * (PROMPT_TOKENS + self.answer_tokens),
            "request_timeout_s": 600.0,
            "threads": 1,
            **engine_args(self.engine),
        }


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


async def _measure() -> dict[str, Any]:
    extent = RolloutExtent.read()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with redis_host() as redis:
            bench = Bench(extent, Path(folder), redis)
            figures["load"] = await bench.compare("main", extent.model, extent.concurrency)
            level = SMALL_LEVEL if SMALL_LEVEL in extent.concurrency else max(extent.concurrency)
            figures["small_model"] = await bench.compare("small", SMALL, [level])
            figures["sidecar_cpu_per_1000_tokens"] = _sidecar_cpu(figures)
    setup = {**asdict(extent), **processor(), "prompt_tokens": PROMPT_TOKENS, "values": bench.values}
    return {"bench": "rollout", "ratio": _ratios(figures), "figures": figures, "setup": setup}


class Bench:
    """The parts, one after the other: what one leaves behind does not run beside the next."""

    def __init__(self, extent: RolloutExtent, folder: Path, redis: tuple[str, str]) -> None:
        self.extent, self.folder, self.redis = extent, folder, redis
        self.values: dict[str, int] = {}
        """model → number of values, of those made here"""

    async def compare(self, run: str, model: str, concurrency: list[int]) -> dict[str, Any]:
        """concurrency → side → figures"""
        path, vocab = self._model(model)
        levels = [self._level(many, vocab) for many in concurrency]
        async with AsyncExitStack() as stack:
            servers = rollout_servers(self.redis, self._settings(run, path, self.extent.rollout()), ["rollout-0"])
            (server,) = await stack.enter_async_context(servers)
            bare = {"do": "bare", "engine": self.extent.engine, "address": server.address(self.extent.engine)}
            sides: list[EngineSide] = []
            for question in ({"do": "client"}, bare):
                child = await load_process(server)
                stack.push_async_callback(child.stop)
                sides.append(EngineSide(question["do"], child, server, question))
            return await measure_levels(sides, levels, self.extent.rounds)

    def _model(self, name: str) -> tuple[str, int]:
        """(folder, vocabulary)"""
        if name not in SIZES:
            from transformers import AutoConfig

            return name, int(AutoConfig.from_pretrained(name).get_text_config().vocab_size)
        path = self.folder / name
        if not path.exists():
            say(f"rollout: writing a random model of {name} values")
            self.values[name] = save_model(SIZES[name], path, self.extent.dtype)
        return str(path), SIZES[name].vocab

    def _level(self, concurrency: int, vocab: int) -> Load:
        answer = self.extent.answer_tokens // (4 if concurrency > 64 else 1)
        return Load(concurrency, PROMPT_TOKENS, answer, vocab, waves=2 if concurrency == 1 else 1)

    def _settings(self, run: str, model: str, rollout: dict[str, Any]) -> dict[str, Any]:
        return {"name": run, "runs_dir": str(self.folder / run), "model": model, "rollout": rollout}


def _sidecar_cpu(figures: dict[str, Any]) -> dict[str, float]:
    """Requests at once → seconds on a core; ``…_small_model`` for the small one."""
    return {
        f"{many}{suffix}": sides["client"]["sidecar_cpu_s_per_1000"]
        for part, suffix in (("load", ""), ("small_model", "_small_model"))
        for many, sides in figures[part].items()
    }


def _ratios(figures: dict[str, Any]) -> dict[str, float]:
    """``tokens_…``, ``cpu_…`` and ``first_token_over_bare_engine_N`` at N requests at once."""
    ratios: dict[str, float] = {}
    for part, suffix in (("load", ""), ("small_model", "_small_model")):
        for many, sides in figures[part].items():
            client, bare = sides["client"], sides["bare"]
            ratios[f"tokens_over_bare_engine_{many}{suffix}"] = sides["tokens_over_bare"]
            ratios[f"cpu_over_bare_engine_{many}{suffix}"] = sides["cpu_over_bare"]
            ratios[f"first_token_over_bare_engine_{many}{suffix}"] = round(
                client["first_p50_ms"] / bare["first_p50_ms"], 3
            )
    return ratios
