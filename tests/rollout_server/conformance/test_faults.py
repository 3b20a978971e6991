"""An engine that hangs, is killed or runs out of memory, while answers are under way. Each test has its own.

That one which hangs can be ended the folder's own engines show: they are ended so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.rollout_server.conformance.subject import ENGINES, PROMPT, SETTINGS, Subject, broken_off, gone, prompt
from tests.rollout_server.conftest import Reference, ask, members, skip_without, small_config, whole

from penstock.rollout_server import EngineError

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture(params=ENGINES)
async def own(request: pytest.FixtureRequest, tiny_model: str, tmp_path: Path) -> AsyncIterator[Subject]:
    await skip_without(request.param)
    started = await Subject.start(request.param, tiny_model, tmp_path)
    group = started.process_group
    try:
        yield started
    finally:
        await started.engine.stop()
        await gone(group)


async def test_an_engine_that_hangs_goes_on_and_one_that_the_kernel_kills_says_so(
    own: Subject, reference: Reference
) -> None:
    """The kernel takes the process that has most memory, by SIGKILL."""
    tasks = await own.under_load(3, own.long // 2)
    own.send(signal.SIGSTOP)
    assert not await own.engine.healthy()
    own.send(signal.SIGCONT)
    async with asyncio.timeout(60):
        while not await own.engine.healthy():
            await asyncio.sleep(0.1)
    for i, answer in enumerate(await asyncio.gather(*tasks)):
        assert len(answer.token_ids) == own.long // 2
        own.close(answer.logprobs, reference.logprobs(prompt(i), answer.token_ids))

    tasks = await own.under_load(3)
    os.kill(max(members(own.process_group), key=resident_bytes), signal.SIGKILL)
    await broken_off(tasks)
    assert not await own.engine.healthy()
    assert re.search(r"was killed.*, perhaps by the kernel for want of memory", own.engine.stderr_tail())
    with pytest.raises(EngineError) as caught:
        await whole(own.engine, ask(PROMPT, 4))
    assert caught.value.retryable
    with pytest.raises(EngineError):
        await own.load(reference, reference.first)


@pytest.mark.parametrize("name", ENGINES)
async def test_killing_the_owner_leaves_no_process_of_the_engine(name: str, tiny_model: str, tmp_path: Path) -> None:
    await skip_without(name)
    config = small_config(engine=name, **SETTINGS[name]).model_dump_json()
    program = str(Path(__file__).with_name("owner.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = await asyncio.create_subprocess_exec(
        sys.executable, program, config, tiny_model, str(tmp_path), stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert owner.stdout is not None
        said = await owner.stdout.readline()
        assert said, f"the owner ended with status {await owner.wait()}: see what it printed"
        group = int(said)
        assert members(group)
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()
        await owner.wait()
    await gone(group)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
