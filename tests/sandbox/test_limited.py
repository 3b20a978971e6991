from __future__ import annotations

import asyncio
import os

from penstock.sandbox import SandboxConfig
from penstock.sandbox.bwrap.process_box import ProcessBox
from penstock.sandbox.limited import SessionSlot
from penstock.sandbox.unsafe_subprocess import UnsafeSubprocessSandbox

STARTS_AT_ONCE = max(2, os.cpu_count() or 1)


class Watched(UnsafeSubprocessSandbox):
    starting = most = 0

    async def _launch(self, place: SessionSlot) -> ProcessBox:
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            return await super()._launch(place)
        finally:
            self.starting -= 1


async def test_limited_boxes_that_are_asked_for_together_start_in_turn() -> None:
    sandbox = Watched(SandboxConfig(backend="unsafe_subprocess"))
    many = 3 * STARTS_AT_ONCE
    try:
        sessions = await asyncio.gather(*(sandbox.start(f"episode {number}") for number in range(many)))
        answers = await asyncio.gather(*(session.run_python("print(6 * 7)") for session in sessions))
    finally:
        await sandbox.close()
    assert [answer.stdout for answer in answers] == ["42\n"] * many
    assert sandbox.most == STARTS_AT_ONCE
