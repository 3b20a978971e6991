"""One engine of each kind, started once for all tests of this folder.

A test leaves an engine that serves; which weights it has, the next one says. A new engine is one more in `ENGINES`.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import ENGINES, Subject, gone
from tests.rollout_server.conftest import skip_without


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=ENGINES)
async def subject(
    request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    await skip_without(request.param)
    started = await Subject.start(request.param, tiny_model, tmp_path_factory.mktemp("logs"))
    try:
        yield started
    finally:
        group = started.process_group
        started.send(signal.SIGSTOP)  # one that hangs can be ended
        await started.engine.stop()
        await gone(group)
        for report in started.reports:
            print(f"{request.param}: {report.model_dump_json()}")
