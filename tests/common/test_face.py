"""The face is lazy: what a name needs is loaded with it, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock.common

HEAVY = "fastapi starlette uvicorn pydantic prometheus_client opentelemetry numpy torch"


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("files", ""),
        ("backoff", ""),
        ("process", ""),
        ("concurrency", ""),
        ("registry", ""),
        ("tracing", ""),
        ("guard", ""),
        ("prometheus", "prometheus_client"),
        ("http", "starlette uvicorn pydantic"),
    ],
)
def test_module_is_light(module: str, allowed: str) -> None:
    forbidden = sorted(set(HEAVY.split()) - set(allowed.split()))
    code = f"import penstock.common.{module}, sys; print([m for m in {forbidden} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


def test_every_name_of_the_face_exists() -> None:
    assert all(hasattr(penstock.common, name) for name in penstock.common.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        _ = penstock.common.no_such
