"""Hostile code against every backend but the one that has no walls.

Each attack must be contained, be reported as what it is (a `RunResult`, never a `SandboxError`: that would be blamed on
us and the episode tried again), and leave its session, its neighbour and their server as they were.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.sandbox.attacks.plants import Host, planted_host
from tests.sandbox.attacks.targets import WITHOUT_ZYGOTE, Target, attacked_backend

from penstock.sandbox import Session


@pytest.fixture(scope="package")
def host() -> Iterator[Host]:
    with planted_host() as planted:
        yield planted


BACKENDS = {
    "bwrap": pytest.mark.bwrap,
    WITHOUT_ZYGOTE: pytest.mark.bwrap,
    "remote": pytest.mark.bwrap,
    "docker": pytest.mark.docker,
}


@pytest_asyncio.fixture(
    scope="package", loop_scope="session", params=[pytest.param(name, marks=mark) for name, mark in BACKENDS.items()]
)
async def target(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[Target]:
    async with attacked_backend(request.param) as attacked:
        yield attacked


@pytest_asyncio.fixture(loop_scope="session")
async def session(target: Target) -> AsyncIterator[Session]:
    """A box for one attack. After it the box, its neighbour and their server serve the next request."""
    opened = await target.sandbox.start("an attack")
    try:
        yield opened
        assert (await opened.run_python("40 + 2")).stdout == "42\n"
        await target.visit_neighbour()
    finally:
        await opened.close()
