"""The record of vLLM's control routes, with which the stand-ins compare each call; no vLLM is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rollout_server.engines.stand_ins import ROUTES as RECORD
from tests.rollout_server.engines.vllm.vllm_routes import ROUTES, read_routes

from penstock.rollout_server.engines.vllm.server import VLLM


def test_every_route_that_must_be_there_is_recorded() -> None:
    assert {name.partition(" ")[2] for name in RECORD if " " in name} == ROUTES


def test_the_vllm_that_is_installed_here_has_what_is_recorded() -> None:
    """It may have more: several versions are within the range that is taken."""
    python = Path(VLLM.find_python(None))
    installed = next(python.parent.parent.glob("lib/python3*/site-packages/vllm"), None)
    if installed is None:
        pytest.skip("no .venv-vllm here; scripts/setup-vllm makes it")
    found = read_routes(installed.parent)
    for name, recorded in RECORD.items():
        if isinstance(recorded, list):
            assert name in found, f"no {name}"
            assert set(recorded) <= set(found[name]), name
        else:
            assert found[name] == recorded
