"""Compose's own reading of the files, for each profile and with GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.placements.compose.stacks import RECIPE

from penstock.deploy.placements.compose.stack import Stack, make_stack

pytestmark = [pytest.mark.deep, pytest.mark.docker]
ALWAYS = {"redis", "sandbox", "head", "rollout", "agent", "page"}


def resolved(folder: Path, *options: str) -> dict[str, Any]:
    try:
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no `docker compose`; scripts/setup-compose installs it")
    command = ["docker", "compose", *options, "config", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_profile_is_read_as_it_is_meant(tmp_path: Path) -> None:
    make_stack(Stack(tmp_path / "stack", RECIPE, ["name=mine", "sandbox.server.warm={default: 2}"]))
    plain = resolved(tmp_path / "stack")
    assert (plain["name"], set(plain["services"])) == ("penstock-mine", ALWAYS)
    assert set(resolved(tmp_path / "stack", "--profile", "metrics")["services"]) == {*ALWAYS, "exporter", "prometheus"}
    published = [port for service in plain["services"].values() for port in service.get("ports", [])]
    assert [(port["host_ip"], port["published"], port["target"]) for port in published] == [("127.0.0.1", "8600", 8600)]
    command = plain["services"]["head"]["command"]
    assert command[:3] == ["penstock", "run", "/work/recipes/calculator.yaml"]
    assert "sandbox.server.warm={default: 2}" in command
    assert command.index("sandbox.server.warm={default: 2}") < command.index("rollout.servers=0")
    owner = (tmp_path / "stack" / "secrets").stat()
    assert {service["user"] for service in plain["services"].values()} == {f"{owner.st_uid}:{owner.st_gid}"}


def test_gpus_reach_the_engine_as_reservations(tmp_path: Path) -> None:
    make_stack(Stack(tmp_path / "stack", RECIPE, [], trainer_gpus="0", rollout_gpus=["1", "2"]))
    services = resolved(tmp_path / "stack")["services"]
    assert set(services) == {*ALWAYS, "rollout-1"}
    reserved = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services.items()
        if "deploy" in service
    }
    device = {"capabilities": ["gpu"], "driver": "nvidia"}
    assert reserved == {
        "head": [{**device, "device_ids": ["0"]}],
        "rollout": [{**device, "device_ids": ["1"]}],
        "rollout-1": [{**device, "device_ids": ["2"]}],
    }
    assert services["rollout-1"]["command"] == services["rollout"]["command"]


def test_a_stack_without_its_settings_says_how_to_get_them(tmp_path: Path) -> None:
    make_stack(Stack(tmp_path / "stack", RECIPE))
    (tmp_path / "stack" / ".env").unlink()
    done = subprocess.run(
        ["docker", "compose", "-f", "compose.yaml", "config"],
        cwd=tmp_path / "stack",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "penstock compose init writes it into .env" in done.stderr
