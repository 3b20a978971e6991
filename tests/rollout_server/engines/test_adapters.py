"""Places of adapters in an engine, with the engine left out."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.rollout_server.engines.adapters import ADAPTER_SLOTS, TENSORS, AdapterSlots
from penstock.rollout_server.protocol import AdapterRef, BadRequest, EngineError


class Places:
    """What an engine has."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.names: list[str] = []
        self.loads = 0
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.slots = AdapterSlots(self._load, self._unload, timeout_s)

    async def _load(self, name: str, folder: Path) -> None:
        self.loads += 1
        await self.may_load.wait()
        if folder.name == "bad":
            raise EngineError("cannot be loaded", retryable=False)
        self.names.append(name)
        assert len(self.names) <= ADAPTER_SLOTS

    async def _unload(self, name: str) -> None:
        self.names.remove(name)


def adapter(folder: Path, name: str) -> AdapterRef:
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / TENSORS).write_text(name)
    return AdapterRef(sha256=hashlib.sha256(name.encode()).hexdigest(), folder=str(place))


async def test_the_place_of_the_adapter_that_was_used_longest_ago_is_taken(tmp_path: Path) -> None:
    places = Places()
    all_of_them = [adapter(tmp_path, str(number)) for number in range(ADAPTER_SLOTS + 1)]
    for one in (*all_of_them[:-1], all_of_them[0], all_of_them[-1]):
        async with places.slots.held(one) as name:
            assert name == one.sha256[:32]
    assert places.loads == ADAPTER_SLOTS + 1
    assert all_of_them[0].sha256[:32] in places.names
    assert all_of_them[1].sha256[:32] not in places.names


async def test_an_adapter_in_use_keeps_its_place_and_others_wait(tmp_path: Path) -> None:
    places = Places()
    async with AsyncExitStack() as stack:
        for number in range(ADAPTER_SLOTS):
            await stack.enter_async_context(places.slots.held(adapter(tmp_path, str(number))))
        waits = asyncio.create_task(stack.enter_async_context(places.slots.held(adapter(tmp_path, "more"))))
        await asyncio.wait([waits], timeout=0.2)
        assert not waits.done()
        before = list(places.names)
        async with AsyncExitStack() as first:
            first.push_async_exit(stack.pop_all())
        assert await waits
        assert before[0] not in places.names


async def test_no_place_in_time_is_an_error_of_the_request(tmp_path: Path) -> None:
    places = Places(timeout_s=0.05)
    places.may_load.clear()
    with pytest.raises(EngineError, match="no place for another adapter"):
        async with places.slots.held(adapter(tmp_path, "one")):
            pass
    places.may_load.set()
    while not places.names:  # the load went on
        await asyncio.sleep(0.01)
    async with places.slots.held(adapter(tmp_path, "one")):
        assert places.loads == 1


async def test_requests_at_one_time_load_an_adapter_once(tmp_path: Path) -> None:
    places, one = Places(), adapter(tmp_path, "one")

    async def use() -> None:
        async with places.slots.held(one):
            await asyncio.sleep(0)

    await asyncio.gather(*(use() for _ in range(10)))
    assert places.loads == 1


async def test_what_cannot_be_loaded_takes_no_place(tmp_path: Path) -> None:
    places = Places()
    for ref, kind in (
        (adapter(tmp_path, "bad"), EngineError),
        (AdapterRef(sha256="0" * 64, folder=str(tmp_path / "bad")), BadRequest),
        (AdapterRef(sha256="0" * 64, folder=str(tmp_path / "none")), BadRequest),
    ):
        for _ in range(ADAPTER_SLOTS + 1):
            with pytest.raises(kind):
                async with places.slots.held(ref):
                    pass
    assert places.names == []
    async with places.slots.held(None) as name:
        assert name is None
