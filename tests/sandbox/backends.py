"""The backends whose sessions must keep the same promises."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.sandbox.server.conftest import TOKEN, serving

from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox

OWN_BOXES = [
    pytest.param("bwrap", marks=pytest.mark.bwrap),
    pytest.param("docker", marks=pytest.mark.docker),
    "unsafe_subprocess",
]
BACKENDS = [*OWN_BOXES, pytest.param("remote", marks=pytest.mark.bwrap)]
"""Where `remote` is another promise: a server lets a run go on whose caller left, and takes no limit over an hour."""
CONFIG = SandboxConfig(max_boxes=4, output_bytes=4096, image="penstock-box:base")


@contextlib.asynccontextmanager
async def sandbox_of(backend: str) -> AsyncIterator[Sandbox]:
    """Of `CONFIG` but for the backend; `remote` is a server with bubblewrap's boxes."""
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(CONFIG)) if backend == "remote" else None
        sandbox = make_sandbox(CONFIG.model_copy(update={"backend": backend, "url": url}), "tests", TOKEN)
        stack.push_async_callback(sandbox.close)
        yield sandbox
