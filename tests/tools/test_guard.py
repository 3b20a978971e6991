from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from penstock.tools import (
    BaseTool,
    RetryPolicy,
    ToolConfig,
    ToolGuard,
    ToolInfraError,
    ToolResult,
    ToolUnavailable,
    retry,
)


class Service(BaseTool):
    """Refuses so many first calls, then answers; keeps how many calls ran at once."""

    name = "service"
    description = "Answers."
    parameters: ClassVar[Any] = {"type": "object", "properties": {"q": {"type": "string"}}}

    def __init__(self, refusals: int = 0, pure: bool = False, takes_s: float = 0.0) -> None:
        super().__init__()
        self.refusals, self.pure, self.takes_s = refusals, pure, takes_s
        self.calls = self.at_once = self.most_at_once = 0

    async def execute(self, state: Any, arguments: Any) -> ToolResult:
        self.calls += 1
        if self.calls <= self.refusals:
            raise ToolUnavailable("service", "HTTP 429", after_s=0.01)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.at_once -= 1
        return ToolResult(f"answer {self.calls}", is_error=arguments.get("q") == "bad")


def guard(**fields: Any) -> ToolGuard:
    made = ToolGuard(ToolConfig(name="service", **fields))
    made._policy = RetryPolicy(made.config.retries, first_wait_s=0.001)
    return made


async def test_a_busy_service_is_asked_again_and_the_limit_says_how_often() -> None:
    assert (await guard(retries=2).call(Service(refusals=2), None, {})).text == "answer 3"
    with pytest.raises(ToolUnavailable, match=r"HTTP 429 \(3 attempts\)"):
        await guard(retries=2).call(Service(refusals=3), None, {})


async def test_other_failures_and_timeouts_are_not_repeated() -> None:
    calls = 0

    async def fail() -> None:
        nonlocal calls
        calls += 1
        raise ToolInfraError("service", "broken")

    with pytest.raises(ToolInfraError, match="broken"):
        await retry(fail, RetryPolicy())
    assert calls == 1
    slow = Service(takes_s=5)
    result = await guard(timeout_s=0.05).call(slow, None, {})
    assert (result.text, result.is_error, slow.calls) == ("Error: service did not finish within 0.05 s", True, 1)


def test_waits_grow_spread_and_honour_the_service() -> None:
    policy = RetryPolicy(first_wait_s=1, max_wait_s=4)
    waits = [[policy.wait_s(attempt) for _ in range(50)] for attempt in (1, 2, 3, 9)]
    for some, (low, high) in zip(waits, [(0.5, 1), (1, 2), (2, 4), (2, 4)], strict=True):
        assert all(low <= wait <= high for wait in some)
        assert len(set(some)) > 1
    assert policy.wait_s(1, asked_s=3) == 3
    assert policy.wait_s(1, asked_s=3600) == 4


async def test_no_more_calls_at_once_than_allowed_and_waiting_is_not_the_calls_time() -> None:
    service = Service(takes_s=0.3)
    turnstile = guard(concurrency=2, timeout_s=1.5)
    results = await asyncio.gather(*(turnstile.call(service, None, {}) for _ in range(12)))
    assert service.most_at_once == 2
    assert not any(result.is_error for result in results)


async def test_nobody_waits_for_a_turn_for_ever_and_a_cancelled_call_gives_its_turn_back() -> None:
    service = Service(takes_s=5)
    turnstile = ToolGuard(ToolConfig(name="service", concurrency=1), queue_deadline_s=0.05)
    first = asyncio.create_task(turnstile.call(service, None, {}))
    await asyncio.sleep(0)
    with pytest.raises(ToolInfraError, match="no turn within"):
        await turnstile.call(service, None, {})
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    service.takes_s = 0
    assert (await turnstile.call(service, None, {})).text == "answer 2"


async def test_pure_tools_answer_from_memory_by_arguments_and_errors_are_not_kept() -> None:
    service, remember = Service(pure=True), guard(cache_entries=2)

    async def ask(**arguments: str) -> str:
        return (await remember.call(service, None, arguments)).text

    assert [await ask(q="a", k="1"), await ask(k="1", q="a"), await ask(q="b")] == ["answer 1", "answer 1", "answer 2"]
    assert [await ask(q="bad"), await ask(q="bad")] == ["answer 3", "answer 4"]
    await ask(q="c")
    assert await ask(q="a", k="1") == "answer 6"
    impure = Service()
    assert [(await remember.call(impure, None, {})).text for _ in range(2)] == ["answer 1", "answer 2"]
