"""An engine that hangs, is killed or runs out of memory, while answers are under way.

That an engine that hangs can be ended, the folder's fixture shows: it ends all of them so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.rollout_server.conformance.subject import (
    ENGINES,
    PROMPT,
    SGLANG,
    VLLM,
    Subject,
    broken_off,
    engine_config,
    gone,
    prompt,
)
from tests.rollout_server.conftest import Reference, ask, members, skip_without, whole

from penstock.rollout_server import EngineError

pytestmark = [pytest.mark.crash, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


def deep(engine: object) -> object:
    """The engine's parameter, for the deep run only."""
    return pytest.param(*engine.values, marks=[*engine.marks, pytest.mark.deep])  # type: ignore[attr-defined]


async def test_an_engine_that_hung_continues(subject: Subject, reference: Reference) -> None:
    await subject.hold_first(reference)
    tasks = await subject.under_load(3, subject.long // 2)
    subject.send(signal.SIGSTOP)
    assert not await subject.engine.healthy()
    subject.send(signal.SIGCONT)
    async with asyncio.timeout(60):
        while not await subject.engine.healthy():
            await asyncio.sleep(0.1)
    for i, answer in enumerate(await asyncio.gather(*tasks)):
        assert len(answer.token_ids) == subject.long // 2
        subject.close(answer.logprobs, reference.logprobs(prompt(i), answer.token_ids))


@pytest.mark.ends_engine
@pytest.mark.parametrize("subject", [ENGINES[0], VLLM, deep(SGLANG)], indirect=True)
async def test_an_engine_killed_by_the_kernel_says_so(subject: Subject, reference: Reference) -> None:
    """The kernel takes the process that has most memory, by SIGKILL."""
    victim = max(members(subject.process_group), key=resident_bytes)
    tasks = await subject.under_load(3)
    os.kill(victim, signal.SIGKILL)  # at once, that no answer is whole before it
    await broken_off(tasks)
    assert not await subject.engine.healthy()
    assert re.search(r"was killed.*, perhaps by the kernel for want of memory", subject.engine.stderr_tail())
    with pytest.raises(EngineError) as caught:
        await whole(subject.engine, ask(PROMPT, 4))
    assert caught.value.retryable
    with pytest.raises(EngineError):
        await subject.load(reference, reference.first)


@pytest.mark.parametrize("name", [ENGINES[0], deep(VLLM), deep(SGLANG)])
async def test_killing_the_owner_leaves_no_process(name: str, tiny_model: str, tmp_path: Path) -> None:
    await skip_without(name)
    config = engine_config(name).model_dump_json()
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
