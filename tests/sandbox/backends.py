"""The backends whose sessions must keep the same promises."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest
from tests.sandbox.managed.harness import MANAGED, managed_sandbox
from tests.sandbox.server.conftest import TOKEN, serving

from penstock.sandbox import SandboxConfig, make_sandbox

OWN_BOXES = [
    pytest.param("bwrap", marks=pytest.mark.bwrap),
    pytest.param("docker", marks=pytest.mark.docker),
    "unsafe_subprocess",
    *(pytest.param(provider, marks=pytest.mark.bwrap) for provider in sorted(MANAGED)),
]
BACKENDS = [*OWN_BOXES, pytest.param("remote", marks=pytest.mark.bwrap)]
"""Managed backends are the provider's own SDK before a replica of its API, with boxes of bubblewrap behind it.

Where `remote` is another promise: a server lets a run go on whose caller left, and takes no limit over an hour."""
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=30.0, output_bytes=4096, image="penstock-box:base")


DEEP_BACKENDS = frozenset({"remote", "docker", "bwrap without zygote", *MANAGED})
"""The same driver is inside: by default only tests marked `on_every_backend` are asked of them."""
FURTHER_PROVIDERS = MANAGED - {"kubernetes"}
F = TypeVar("F", bound=Callable[..., Any])


def on_every_backend(test: F) -> F:
    """Decorator: asked of every backend by default too, not in the deep run alone."""
    test.__dict__["on_every_backend"] = True
    return test


def on_every_provider(test: F) -> F:
    """Decorator: asked of every managed backend by default; `on_every_backend` asks Kubernetes for all of them."""
    test.__dict__["on_every_provider"] = True
    return test


def is_deep(item: pytest.Item) -> bool:
    """Whether a test of a backend belongs to the deep run."""
    parameters = getattr(item, "callspec", None)
    given = parameters.params.values() if parameters is not None else ()
    backends = {value for value in given if isinstance(value, str) and value in DEEP_BACKENDS}
    marks = vars(item.function)  # type: ignore[attr-defined]
    by_default = marks.get("on_every_backend", False) and not backends & FURTHER_PROVIDERS
    return bool(backends) and not by_default and not marks.get("on_every_provider", False)


@contextlib.asynccontextmanager
async def sandbox_of(backend: str, **settings: object) -> AsyncIterator[Any]:
    """Of `CONFIG` and `settings`; `remote` is a server with bubblewrap's boxes, a managed one a replica."""
    config = CONFIG.model_copy(update=settings)
    async with contextlib.AsyncExitStack() as stack:
        if backend in MANAGED:
            managed = await stack.enter_async_context(managed_sandbox(backend, config))
            yield managed.sandbox
            return
        url = await stack.enter_async_context(serving(config)) if backend == "remote" else None
        sandbox = make_sandbox(config.model_copy(update={"backend": backend, "url": url}), "tests", TOKEN)
        stack.push_async_callback(sandbox.close)
        yield sandbox
