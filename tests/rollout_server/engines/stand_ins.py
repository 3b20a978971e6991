"""Servers that stand in for vLLM and SGLang: they keep what an engine keeps, and sample whenever they may.

Every call is compared with the recorded routes and types of the real server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiohttp import web
from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.http.event_server import serving, sglang_event, vllm_event

from penstock.rollout_server import EngineError, EngineInfo
from penstock.rollout_server.engines import vllm_plugin
from penstock.rollout_server.engines.http.event_client import EventClient
from penstock.rollout_server.engines.sglang.engine import SGLangEngine
from penstock.rollout_server.engines.sglang.weights import SGLangWeights
from penstock.rollout_server.engines.vllm.engine import VLLMEngine
from penstock.rollout_server.engines.vllm.weights import VLLMWeights
from penstock.weight_sync import ChainFile, Manifest, state_of

FOLDER = Path(__file__).parent
ROUTES: dict[str, Any] = json.loads((FOLDER / "vllm/vllm_routes.json").read_text())
VLLM_TAGS = set(re.findall(r"'(\w+)'", ROUTES["SLEEP_TAGS"]))
VALUES = {
    "level": {"0", "1", "2"},
    "mode": set(re.findall(r"'(\w+)'", ROUTES["PauseMode"])),
    "clear_cache": {"true", "false"},
    "tags": VLLM_TAGS,
}
TYPES: dict[str, dict[str, str]] = json.loads((FOLDER / "sglang/sglang_types.json").read_text())
TYPE_OF = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/load_lora_adapter": "LoadLoRAAdapterReqInput",
    "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
SIMPLE = {"bool": bool, "str": str, "int": int, "Optional[str]": str, "Optional[bool]": bool}
"""Annotations whose values can be compared by kind alone."""
MANIFEST = Manifest("shm", (ChainFile(3, None, "/dev/null", 0, "", state_of(())),), ())


def check_vllm(method: str, path: str) -> None:
    parts = urlsplit(path)
    parameters = ROUTES[f"{method} {parts.path}"]
    for name, values in parse_qs(parts.query, strict_parsing=True).items() if parts.query else ():
        assert name in parameters, f"{parts.path} has no {name}"
        assert set(values) <= VALUES[name], f"{parts.path}: {name}"


def check_sglang(kind: str, body: Mapping[str, Any]) -> None:
    """`kind`: a path or a type."""
    fields = TYPES[TYPE_OF.get(kind, kind)]
    for name, value in body.items():
        assert name in fields, f"{kind} has no field {name}"
        if fields[name] in SIMPLE:
            assert type(value) is SIMPLE[fields[name]], f"{kind}.{name}: {fields[name]}"
        if fields[name].startswith("Literal["):
            assert repr(value) in fields[name], f"{kind}.{name}: {fields[name]}"


class StandIn(ABC):
    """A server: `call` is what its control routes do, `answer` its route for tokens."""

    parts = frozenset({"weights", "kv_cache"})
    name, alive, end_of_it = "the stand-in", True, "was ended"
    timeout_s = 60.0

    def __init__(self, folder: Path, level: int = 1, manual: Collection[str] = ()) -> None:
        self.folder, self.sleep_level = folder, level
        self.calls: list[tuple[str, Any]] = []
        self.fails = ""
        """A route that is answered by an error."""
        self.version = "0"
        self.resident = set(self.parts)
        self.holds_weights = True
        self.paused = False
        self.aborts = 0
        self.wrongly = 0
        """Tokens that were sampled without weights or cache."""
        self.streams: set[Any] = set()
        self.events: EventClient
        self.manual: dict[str, asyncio.Future[Path]] = {
            phase: asyncio.get_running_loop().create_future() for phase in manual
        }
        """vLLM's phases whose workers report by the test's hand, and in which folder."""

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self.calls.append((path, body))
        if self.fails and path.startswith(self.fails):
            raise EngineError(f"{path} failed")
        return self.does(method, path, dict(body or {}))

    @abstractmethod
    def does(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of a route."""

    @abstractmethod
    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        """Of an answer's stream."""

    def loaded(self, version: str) -> None:
        assert "weights" in self.resident, "there is no memory to load into"
        self.version, self.holds_weights = version, True

    def release(self, parts: set[str], *, keeps_weights: bool) -> None:
        self.resident -= parts
        self.holds_weights = self.holds_weights and keeps_weights

    async def answer(self, request: web.Request) -> web.StreamResponse:
        wanted = await request.json()
        left = wanted.get("sampling_params", {}).get("max_tokens") or wanted["sampling_params"]["max_new_tokens"]
        response, aborts, count = web.StreamResponse(), self.aborts, 0
        await response.prepare(request)
        reason = None
        while reason is None:
            await asyncio.sleep(0.01)
            if self.aborts > aborts:
                reason, ids = "abort", []
            elif self.paused:
                continue
            else:
                self.wrongly += not (self.holds_weights and self.resident >= self.parts)
                ids, count = [7], count + 1
                reason = "length" if count == left else None
            await response.write(f"data: {json.dumps(self.event(ids, reason, count))}\n\n".encode())
        return response

    def cause(self) -> str:
        return "its log is empty"

    def tail(self) -> str:
        return ""

    async def stop(self) -> None:
        self.alive = False
        for stream in self.streams:
            stream.break_off("the server is being stopped")

    @property
    def asked(self) -> list[str]:
        return [path for path, _ in self.calls]

    @property
    def steps(self) -> list[str]:
        """Paths without their queries, with the phase of an update."""
        return [f"{path.partition('?')[0]} {phase_of(body)}".strip() for path, body in self.calls]


def phase_of(body: Any) -> str:
    return str((body or {}).get("update_info", {}).get("phase", ""))


class VLLM(StandIn):
    """vLLM's sleep: `/wake_up` with tags leaves the rest asleep, and the scheduler paused until all is awake."""

    refuses_load = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.says: dict[str, list[str]] = {}
        """By phase: what each worker reports, by default one that it is done."""

    def does(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        check_vllm(method, path)
        route, _, query = path.partition("?")
        if route == "/sleep":
            self.paused = True
            self.aborts += 1
            self.release(set(self.parts), keeps_weights="level=1" in query)
        elif route == "/wake_up":
            tags = {word.removeprefix("tags=") for word in query.split("&") if word}
            self.resident |= tags or self.parts
            awake = self.resident >= self.parts
            self.paused = self.paused and not awake
            return {"status": "awake" if awake else "sleeping"}
        elif route == "/pause":
            self.paused = True
            self.aborts += "mode=abort" in query
        elif route == "/resume":
            self.paused = False
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        elif info := body.get("update_info"):
            self.update(info["phase"], Path(info["report"]))
        return {"weight_version": self.version}

    def update(self, phase: str, report: Path) -> None:
        if phase == "load":
            if self.refuses_load:
                raise EngineError(f"{vllm_plugin.REFUSED}tensor 'a' differs")
            self.loaded("3")
        if phase in self.manual:
            self.manual[phase].set_result(report)
            return
        for number, text in enumerate(self.says.get(phase, [""])):
            (report / str(101 + number)).write_text(text)

    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        return vllm_event(ids, reason, [(int(self.version), 0, count)] if reason else None)


class SGLang(StandIn):
    """SGLang's memory by tags. A paused one takes requests, and samples nothing for them."""

    parts = frozenset({"weights", "kv_cache", "cuda_graph"})

    def does(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path in TYPE_OF:
            check_sglang(path, body)
        if path == "/pause_generation":
            self.paused = True
            self.aborts += body["mode"] == "abort"
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/release_memory_occupation":
            assert self.paused, "it would die: it is not idle"
            self.release(set(body["tags"]), keeps_weights=self.sleep_level == 1 or "weights" not in body["tags"])
        elif path == "/resume_memory_occupation":
            self.resident |= set(body["tags"])
        elif path == "/update_weights_from_disk":
            self.loaded(body["weight_version"])
        return {"weight_version": self.version, "ranks": []}

    def event(self, ids: list[int], reason: str | None, count: int) -> dict[str, Any]:
        version = int(self.version)
        return sglang_event(ids, reason, [(version, 0, count)] if reason else None, version)


SERVERS: dict[str, type[StandIn]] = {"vllm": VLLM, "sglang": SGLang}


@asynccontextmanager
async def running(
    name: str, level: int, folder: Path, *, manual: Collection[str] = (), pause: str = "keep", answer: Any = None
) -> AsyncIterator[tuple[Any, Any]]:
    """(engine, its stand-in), an engine that was started to sleep so deep."""
    server: Any = SERVERS[name](folder, level, manual)
    config = small_config(engine=name, pause=pause)
    engine: Any
    if name == "vllm":
        engine = VLLMEngine(config, str(folder), folder, 0)
        engine.weights = VLLMWeights(config, str(folder), server, server.streams)
    else:
        engine = SGLangEngine(config, str(folder), folder, 0)
        engine.weights = SGLangWeights(config, str(folder), server, server.streams)
        version: Any = SimpleNamespace(check_unchanged=lambda: None)
        engine.weights._read = lambda manifest: (os.open("/dev/null", os.O_RDONLY), {}, version)
    engine.server, engine.streams = server, server.streams
    engine.info = EngineInfo(name=name, engine_version="1", version=0, vocab_size=99, max_model_len=2048)
    async with serving(answer or server.answer) as server.events, asyncio.timeout(60.0):
        yield engine, server
        await engine.stop()
