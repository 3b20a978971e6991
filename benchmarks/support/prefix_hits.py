"""Two servers under episodes of several turns: how many prompt tokens the engines found in their prefix caches.

    not_sticky           each request goes to the less loaded server
    sticky               an episode stays at its server
    grouped_by_load      groups of four with one prompt, sticky; the first turns go to the less loaded server
    grouped              the same, and requests name their group's prompt

Engines keep whole blocks of keys and values, and compute at least one token of each request. What is possible is
counted so (`possible_blocks_…`); the older `possible_hit_rate` is that of blocks of one token.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import aiohttp

from benchmarks.support.comparison import say
from benchmarks.support.rollout_run import Server, load_process, rollout_servers
from benchmarks.support.turns import Turns

NAMES = ("rollout-0", "rollout-1")
TURNS = Turns(episodes=16, turns=6, prompt_tokens=96, answer_tokens=32, observed_tokens=32, vocab=0, sticky=True)
GROUPED = Turns(
    episodes=16, turns=6, prompt_tokens=288, answer_tokens=32, observed_tokens=32, vocab=0, sticky=True, group_size=4
)
"""A prompt of two whole blocks of vLLM's CPU build, 128 tokens each, and what a member needs besides."""
KINDS = {
    "not_sticky": replace(TURNS, sticky=False),
    "sticky": TURNS,
    "grouped_by_load": GROUPED,
    "grouped": replace(GROUPED, prefixes=True),
}
COUNTERS = {
    "vllm": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    "sglang": ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
}
"""Engine → its counters of prompt tokens that were found, and that were looked for."""
ALL_TOKENS = 2 * sum(turns.episodes * 1024 for turns in KINDS.values())
"""Of all contexts, with room to spare: nothing that is measured here is evicted."""
SETTLE_S = 3.0
"""Between two kinds: heartbeats no longer tell of the one before, which would send the next one's episodes away."""
SWITCHES: dict[str, dict[str, Any]] = {
    "vllm": {"disable-log-stats": None},
    "sglang": {"enable-metrics": True},
}
"""Engine → flags without which it does not count."""


async def measure_prefix_hits(
    redis: tuple[str, str], engine: str, settings: dict[str, Any], vocab: int
) -> dict[str, Any]:
    """The hit rates of `KINDS`, and those of an endless cache on one server: ``possible_…``."""
    if engine not in COUNTERS:
        return {"not_measured": f"the {engine} engine has no counters of its own"}
    given = settings["rollout"]
    flags = {f"{engine}_args": {**given.get(f"{engine}_args", {}), **SWITCHES[engine]}}
    room = {"max_concurrent": TURNS.episodes, "kv_cache_tokens": max(given.get("kv_cache_tokens", 0), ALL_TOKENS)}
    async with rollout_servers(redis, {**settings, "rollout": {**given, **flags, **room}}, NAMES) as servers:
        child = await load_process(servers[0])
        try:
            block = await _block_tokens(servers[0], engine)
            figures: dict[str, Any] = {
                "possible_hit_rate": round(possible(TURNS), 3),
                "possible_blocks_hit_rate": round(possible(TURNS, block), 3),
                "possible_blocks_grouped_hit_rate": round(possible(GROUPED, block), 3),
                "block_tokens": block,
            }
            for name, turns in KINDS.items():
                await asyncio.sleep(SETTLE_S)
                before = await _counted(servers, engine)
                await child.ask({"do": "turns", "turns": asdict(replace(turns, vocab=vocab))})
                figures[name] = _rates(before, await _counted(servers, engine))
                say(f"rollout: prefix hits {name}: {figures[name]['hit_rate']}")
            return figures
        finally:
            await child.stop()


def prefix_ratios(prefix: dict[str, Any]) -> dict[str, float]:
    """Empty where nothing was counted."""
    if "not_measured" in prefix:
        return {}
    hits = {name: prefix[name]["hit_rate"] for name in KINDS}
    return {
        "prefix_hits_sticky_over_not": round(hits["sticky"] / max(hits["not_sticky"], 1e-3), 2),
        "prefix_hits_sticky_over_possible": round(hits["sticky"] / prefix["possible_hit_rate"], 3),
        "prefix_hits_sticky_over_possible_blocks": round(hits["sticky"] / prefix["possible_blocks_hit_rate"], 3),
        "prefix_hits_grouped_over_by_load": round(hits["grouped"] / max(hits["grouped_by_load"], 1e-3), 2),
        "prefix_hits_grouped_over_possible_blocks": round(
            hits["grouped"] / prefix["possible_blocks_grouped_hit_rate"], 3
        ),
    }


def possible(turns: Turns, block: int = 1) -> float:
    """Share of all prompt tokens that the group's prompt or an earlier turn's context already held, in whole blocks.

    Of an earlier turn all but the last sampled token has keys and values; at least one token of a request is computed.
    With `block` 1 neither is taken off, as in figures of earlier releases.
    """
    grown = turns.answer_tokens + turns.observed_tokens
    contexts = [turns.prompt_tokens + number * grown for number in range(turns.turns)]
    within_episode = sum(_blocks(context - turns.observed_tokens, block) for context in contexts[1:])
    of_prompt = (turns.group_size - 1) * _blocks(turns.prompt_tokens, block)
    return (turns.group_size * within_episode + of_prompt) / (turns.group_size * sum(contexts))


def _blocks(tokens: int, block: int) -> int:
    return tokens if block == 1 else (tokens - 1) // block * block


async def _block_tokens(server: Server, engine: str) -> int:
    """Tokens of one block of the engine's cache; SGLang keeps single tokens unless `page-size` says otherwise."""
    found = re.search(
        r'^vllm:cache_config_info{[^}]*\bblock_size="(\d+)"', await _metrics(server.address(engine)), re.M
    )
    return int(found[1]) if found else 1


def _rates(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> dict[str, Any]:
    found = [later[0] - earlier[0] for earlier, later in zip(before, after, strict=True)]
    asked = [later[1] - earlier[1] for earlier, later in zip(before, after, strict=True)]
    return {"hit_rate": round(sum(found) / sum(asked), 3), "prompt_tokens": sum(asked), "by_server": asked}


async def _counted(servers: Sequence[Server], engine: str) -> list[tuple[float, float]]:
    return [await _counters(server.address(engine), COUNTERS[engine]) for server in servers]


async def _counters(address: dict[str, str], names: tuple[str, str]) -> tuple[float, float]:
    text = await _metrics(address)
    return _sum(text, names[0]), _sum(text, names[1])


async def _metrics(address: dict[str, str]) -> str:
    connector = aiohttp.UnixConnector(address["socket"]) if address["socket"] else None
    headers = {"Authorization": f"Bearer {address['key']}"}
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(address["url"], connector=connector, headers=headers, timeout=timeout) as http,
        http.get("/metrics") as response,
    ):
        response.raise_for_status()
        return await response.text()


def _sum(text: str, name: str) -> float:
    """Of a counter over all its labels. Raises where the engine does not know it: 0 would be a wrong figure."""
    values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise LookupError(f"the engine's /metrics has no {name}")
    return sum(map(float, values))
