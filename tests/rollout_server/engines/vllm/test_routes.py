"""What the adapter asks of vLLM's control routes is in vLLM's released ones, recorded in a file; no vLLM is needed
here."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.vllm.vllm_routes import ROUTES, read_routes

from penstock.rollout_server import RolloutConfig
from penstock.rollout_server.engines.vllm.server import VLLM
from penstock.rollout_server.engines.vllm.weights import VLLMWeights

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_routes.json").read_text())
TAGS = set(re.findall(r"'(\w+)'", RECORD["SLEEP_TAGS"]))
VALUES = {
    "level": {"0", "1", "2"},
    "mode": set(re.findall(r"'(\w+)'", RECORD["PauseMode"])),
    "clear_cache": {"true", "false"},
    "tags": TAGS,
}


class Noted:
    """In place of the server: notes what it is asked."""

    name, folder = "vLLM", Path()

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self.asked.append(f"{method} {path}")
        return {"status": "sleeping" if path.endswith("tags=weights") else "awake", "weight_version": "3"}

    def cause(self) -> str:
        return ""


def check(asked: str) -> None:
    method, _, path = asked.partition(" ")
    parts = urlsplit(path)
    parameters = RECORD[f"{method} {parts.path}"]
    for name, values in parse_qs(parts.query, strict_parsing=True).items() if parts.query else ():
        assert name in parameters, f"{parts.path} has no {name}"
        assert set(values) <= VALUES[name], f"{parts.path}: {name}"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("pause", get_args(RolloutConfig.model_fields["pause"].annotation))
async def test_turns_and_pauses_ask_in_vllms_terms(pause: str, level: Any, tmp_path: Path) -> None:
    server: Any = Noted()
    weights = VLLMWeights(small_config(engine="vllm", pause=pause), str(tmp_path), server, set())
    await weights.sleep(level)
    await weights.wake()
    await weights._pause()
    await weights._resume()
    assert [asked.partition("?")[0] for asked in server.asked[:3]] == ["POST /sleep", "POST /wake_up", "POST /pause"]
    for asked in server.asked:
        check(asked)
    woken = {tag for asked in server.asked if "/wake_up?" in asked for tag in parse_qs(urlsplit(asked).query)["tags"]}
    assert woken == (TAGS if level == 2 else set()), "all of it is awake in the end"


def test_every_route_that_must_be_there_is_recorded() -> None:
    assert {name.partition(" ")[2] for name in RECORD if " " in name} == ROUTES
    assert ast.literal_eval(RECORD["SLEEP_TAGS"].removeprefix("frozenset(").removesuffix(")")) == (
        "weights",
        "kv_cache",
    )


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
