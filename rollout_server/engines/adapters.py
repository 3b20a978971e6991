"""Adapters that an engine has at once, each under a name that says what it contains.

    request with an adapter ──► loaded already? ──► in use until its answer ends
                                     │ no: verify, unload the one that was used longest ago, load

An adapter that was unloaded is loaded again when a request names it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.rollout_server.protocol import AdapterRef, BadRequest, EngineError

ADAPTER_SLOTS = 8
"""Adapters of an engine. More would take memory from keys and values."""
TENSORS = "adapter_model.safetensors"


@dataclass(slots=True)
class _Loaded:
    users: int = 0
    """Requests that are answered with it."""


class AdapterSlots:
    """One event loop owns it."""

    def __init__(
        self,
        load: Callable[[str, Path], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """`load` puts peft's folder into the engine under a name, and raises `EngineError`; `unload` takes it out."""
        self._load, self._unload, self._timeout_s = load, unload, timeout_s
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """The one that was used longest ago comes first."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Loads under way, which go on if the request that began them ends."""
        self._one_load_at_a_time = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def held(self, adapter: AdapterRef | None) -> AsyncIterator[str | None]:
        """The adapter's name in the engine, which has it until the end of the context; None for none. Raises
        `BadRequest` for a folder of other bytes, `EngineError`."""
        if adapter is None:
            yield None
            return
        name = adapter.sha256[:32]
        try:
            async with asyncio.timeout(self._timeout_s):
                loaded = await self._enter(name, adapter)
        except TimeoutError as error:
            raise EngineError(
                f"no place for another adapter in {self._timeout_s:g} s: {ADAPTER_SLOTS} are in use"
            ) from error
        try:
            yield name
        finally:
            loaded.users -= 1
            self._released.set()

    async def _enter(self, name: str, adapter: AdapterRef) -> _Loaded:
        while (loaded := self._loaded.get(name)) is None:
            if name not in self._loads:
                load = self._loads[name] = asyncio.create_task(self._put(name, adapter))
                load.add_done_callback(lambda _: self._loads.pop(name))
            await asyncio.shield(self._loads[name])
        loaded.users += 1
        self._loaded.move_to_end(name)
        return loaded

    async def _put(self, name: str, adapter: AdapterRef) -> None:
        async with self._one_load_at_a_time:
            await asyncio.to_thread(_verify, adapter)
            await self._make_room()
            await self._load(name, Path(adapter.folder))
            self._loaded[name] = _Loaded()

    async def _make_room(self) -> None:
        while len(self._loaded) >= ADAPTER_SLOTS:
            name = next((name for name, loaded in self._loaded.items() if not loaded.users), None)
            if name is None:
                self._released.clear()
                await self._released.wait()
            else:
                del self._loaded[name]  # first: no request may enter it any more
                await self._unload(name)


def _verify(adapter: AdapterRef) -> None:
    file = Path(adapter.folder) / TENSORS
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BadRequest("adapter", f"{file} cannot be read: {error}") from error
    if digest != adapter.sha256:
        raise BadRequest("adapter", f"{file} has sha256 {digest}, not {adapter.sha256}")
