from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from penstock.common import Backoff
from penstock.tools import BaseTool, ToolConfig, ToolGuard, ToolInfraError, ToolResult, ToolUnavailable


class Service(BaseTool):
    """Refuses its first calls, then answers; `open` holds calls back; keeps how many ran at once."""

    name = "service"
    description = "Answers."
    parameters: ClassVar[Any] = {"type": "object", "properties": {"q": {"type": "string"}}}

    def __init__(self, refusals: int = 0, pure: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.refusals, self.pure, self.broken = refusals, pure, broken
        self.calls = self.running = self.most_running = 0
        self.open = asyncio.Event()
        self.open.set()

    async def execute(self, state: Any, arguments: Any) -> ToolResult:
        self.calls += 1
        if self.broken:
            raise ToolInfraError("service", "broken")
        if self.calls <= self.refusals:
            raise ToolUnavailable("service", "HTTP 429", after_s=0.01)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            await self.open.wait()
        finally:
            self.running -= 1
        return ToolResult(f"answer {self.calls}", is_error=arguments.get("q") == "bad")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tools.guard.BACKOFF", Backoff(0.001, 30.0))


def guard(**fields: Any) -> ToolGuard:
    return ToolGuard(ToolConfig(name="service", **fields))


@pytest.mark.parametrize(("refusals", "calls"), [(0, 1), (2, 3), (3, 3)])
async def test_guard_retries_a_busy_service(refusals: int, calls: int) -> None:
    service = Service(refusals)
    if refusals < calls:
        assert (await guard(retries=2).call(service, None, {})).text == f"answer {calls}"
    else:
        with pytest.raises(ToolUnavailable) as caught:
            await guard(retries=2).call(service, None, {})
        assert "HTTP 429" in caught.value.reason
        assert "3 attempts" in caught.value.reason
    assert service.calls == calls


async def test_guard_repeats_no_other_failure() -> None:
    service = Service(broken=True)
    with pytest.raises(ToolInfraError, match="broken"):
        await guard().call(service, None, {})
    assert service.calls == 1


async def test_guard_repeats_no_call_past_its_deadline() -> None:
    service = Service()
    service.open.clear()
    result = await guard(timeout_s=0.05).call(service, None, {})
    assert (result.text, result.is_error, service.calls) == ("Error: service did not finish within 0.05 s", True, 1)


async def test_guard_limits_concurrency_outside_the_calls_time() -> None:
    service = Service()
    service.open.clear()
    limited = guard(concurrency=2, timeout_s=30)
    calls = [asyncio.create_task(limited.call(service, None, {})) for _ in range(12)]
    while service.running < 2:
        await asyncio.sleep(0)
    service.open.set()
    assert not any(result.is_error for result in await asyncio.gather(*calls))
    assert service.most_running == 2


async def test_guard_bounds_the_wait_for_a_turn() -> None:
    service = Service()
    service.open.clear()
    limited = ToolGuard(ToolConfig(name="service", concurrency=1), queue_deadline_s=0.05)
    first = asyncio.create_task(limited.call(service, None, {}))
    while service.running < 1:
        await asyncio.sleep(0)
    with pytest.raises(ToolInfraError, match="no turn within"):
        await limited.call(service, None, {})
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    service.open.set()
    assert (await limited.call(service, None, {})).text == "answer 2"


async def test_guard_caches_pure_results_but_no_errors() -> None:
    service, caching = Service(pure=True), guard(cache_entries=2)

    async def ask(**arguments: str) -> str:
        return (await caching.call(service, None, arguments)).text

    assert [await ask(q="a", k="1"), await ask(k="1", q="a"), await ask(q="b")] == ["answer 1", "answer 1", "answer 2"]
    assert [await ask(q="bad"), await ask(q="bad")] == ["answer 3", "answer 4"]
    await ask(q="c")
    assert await ask(q="a", k="1") == "answer 6", "the oldest went first"
    impure = Service()
    assert [(await caching.call(impure, None, {})).text for _ in range(2)] == ["answer 1", "answer 2"]


@pytest.mark.parametrize("returned", ["4", None, ("4", 1.0, {}), 4, ToolResult(None)])  # type: ignore[arg-type]
async def test_guard_names_the_tool_that_returns_no_result(returned: Any) -> None:
    class Own(Service):
        def execute(self, state: Any, arguments: Any) -> Any:
            return returned

    for tool in (Own(), Own(pure=True)):
        with pytest.raises(ToolInfraError, match=r"tool service: execute returned .*: return ToolResult\(text\)"):
            await guard().call(tool, None, {})
