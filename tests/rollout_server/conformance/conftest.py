"""One engine of each kind, started once for all tests of this folder.

A test leaves an engine that serves; which weights it has, the next one says. A new engine is one more in `ENGINES`.
Tests that end an engine are marked `ends_engine`: they run last, one per engine in the default run.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.rollout_server.conformance.subject import ENGINES, Subject, gone
from tests.rollout_server.conftest import skip_without


@pytest.hookimpl(trylast=True)  # after pytest has grouped the tests by their fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    last = [item for item in items if item.get_closest_marker("ends_engine")]
    items[:] = [item for item in items if item not in last] + last


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def subjects() -> AsyncIterator[dict[str, Subject]]:
    """The engines that are running, by name. Not a parametrised fixture: pytest would restart one between files."""
    running: dict[str, Subject] = {}
    yield running
    for name, started in running.items():
        for report in started.reports:
            print(f"{name}: {report.model_dump_json()}")
    every = [one for started in running.values() for one in (started, *started.others.values())]
    await asyncio.gather(*map(_end_while_it_hangs, every))


async def _end_while_it_hangs(subject: Subject) -> None:
    """One that hangs can be ended; it takes the whole period of grace."""
    group = subject.process_group
    subject.send(signal.SIGSTOP)
    await subject.stop()
    await gone(group)


@pytest_asyncio.fixture(loop_scope="package", params=ENGINES)
async def subject(
    request: pytest.FixtureRequest,
    subjects: dict[str, Subject],
    tiny_model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    name: str = request.param
    await skip_without(name.partition("+")[0])
    if name in subjects and not await subjects[name].engine.healthy():  # its workers may end before its own process
        ended = subjects.pop(name)
        for one in (ended, *ended.others.values()):
            await one.stop()
    if name not in subjects:
        subjects[name] = await Subject.start(name, tiny_model, tmp_path_factory.mktemp("logs"))
    return subjects[name]
