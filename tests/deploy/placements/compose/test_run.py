"""The quickstart's recipe in real containers: roles are killed, a server comes, nothing is lost, nothing stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.deploy.placements.compose.stacks import RunningStack, docker, why_not

pytestmark = [pytest.mark.deep, pytest.mark.docker, pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1800)]
SHORT = (
    *("name=composed", "trainer.checkpoint_every=4", "group_size=4", "groups_per_step=4"),
    *("data.eval_limit=16", "agent.concurrency=16", "transfer_queue.lease_ttl_s=5"),
    *("stall_timeout_s=900", "rollout.start_timeout_s=600"),  # images are read for the first time, on a busy machine
)
IN_A_BOX = """
import os, socket
def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__
print(tried(lambda: os.listdir("/run/secrets")), tried(lambda: os.listdir("/opt")), tried(lambda: os.listdir("/work")))
print(tried(lambda: socket.create_connection(("127.0.0.1", 8700), 2)), tried(lambda: socket.getaddrinfo("redis", 6379)))
print([name for name in os.environ if "PENSTOCK" in name], len([p for p in os.listdir("/proc") if p.isdigit()]) < 8)
"""
RUN_IN_A_BOX = f"""
import asyncio, os
from penstock.sandbox import SandboxConfig
from penstock.sandbox import make_sandbox

async def main():
    config = SandboxConfig(backend="remote", url="http://sandbox:8700")
    sandbox = make_sandbox(config, "test", os.environ["PENSTOCK_TOKEN"])
    session = await sandbox.start("from the test")
    print((await session.run_python({IN_A_BOX!r})).stdout)
    await session.close()
    await sandbox.close()

asyncio.run(main())
"""


@pytest.fixture
def stack(tmp_path: Path, steps: int) -> Iterator[RunningStack]:
    if missing := why_not():
        pytest.skip(f"{missing}; scripts/setup-compose installs what is needed")
    stack = RunningStack(tmp_path / "stack", *SHORT, f"trainer.steps={steps}")
    try:
        yield stack
    finally:
        stack.down()
    assert stack.leftovers() == []


def _begin(stack: RunningStack) -> None:
    stack.compose("build", "--quiet", timeout_s=600)
    stack.up()
    stack.wait_for(lambda: stack.steps() >= 1)


def _summary_once_done(stack: RunningStack) -> dict[str, Any]:
    assert docker("wait", *stack.containers("head", every=True), timeout_s=600) == "0", stack.tail()
    summary: dict[str, Any] = json.loads((stack.folder / "runs" / "composed" / "summary.json").read_text())
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert (summary["token_mismatches"], summary["episodes_failed"]) == (0, 0)
    assert summary["staleness_max"] <= 2
    return summary


@pytest.mark.parametrize("steps", [8])
def test_compose_run_is_closed_to_others(stack: RunningStack, steps: int) -> None:
    """Steps enough that every container runs while it is looked at."""
    _begin(stack)
    _nothing_is_open(stack)
    assert _in_a_box(stack) == [
        "FileNotFoundError FileNotFoundError FileNotFoundError",
        "ConnectionRefusedError gaierror",
        "[] True",
    ]
    stack.wait_for(lambda: len(_scraped(stack)) == 3)
    summary = _summary_once_done(stack)
    assert (summary["steps"], summary["restarts"]) == (steps, {"trainer": 0})
    versions = [server["version"] for server in _status(stack)["servers"].values()]
    assert len(versions) == 1
    assert min(versions) >= 1, versions  # weights came by HTTP, from another container


@pytest.mark.deep
@pytest.mark.parametrize("steps", [24])
def test_compose_run_survives_kills_and_grows(stack: RunningStack, steps: int) -> None:
    _begin(stack)
    stack.compose("kill", "rollout")  # docker kill: down until somebody says up
    stack.kill_from_outside("agent", "penstock agent")  # a crash: the engine starts it again
    stack.kill_from_outside("head", "train-rank")  # the head starts it again
    killed_at = stack.steps()
    stack.up("--scale", "rollout=2")
    stack.wait_for(lambda: len(_status(stack)["servers"]) == 2)
    assert killed_at <= stack.steps() < steps
    stack.wait_for(lambda: len(_scraped(stack)) == 4)

    summary = _summary_once_done(stack)
    assert stack.inspect("agent")["RestartCount"] == 1
    assert (summary["steps"], summary["restarts"]) == (steps, {"trainer": 1})
    versions = {name: server["version"] for name, server in _status(stack)["servers"].items()}
    assert len(versions) == 2
    assert min(versions.values()) >= 1, versions


def _status(stack: RunningStack) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.in_role("exporter", "penstock", "queue", "status"))
    return found


def _scraped(stack: RunningStack) -> list[str]:
    """Targets that Prometheus reaches, as ``job instance``."""
    query = ("promtool", "query", "instant", "--format=json", "http://127.0.0.1:9090", "up == 1")
    samples = json.loads(stack.compose("exec", "--no-TTY", "prometheus", *query))
    return sorted(f"{sample['metric']['job']} {sample['metric']['instance']}" for sample in samples)


def _in_a_box(stack: RunningStack) -> list[str]:
    """What code of a box sees of its container and of the others."""
    return stack.in_role("agent", "python", "-c", RUN_IN_A_BOX).splitlines()


def _nothing_is_open(stack: RunningStack) -> None:
    """As the engine has it on record, and as it is seen from outside and between containers."""
    every = stack.compose("ps", "--quiet").split()
    inspected = json.loads(docker("inspect", *every))
    assert len(inspected) == 8
    published = [port for found in inspected for port in found["HostConfig"]["PortBindings"] or {}]
    assert published == ["8600/tcp"]
    for found in inspected:
        host = found["HostConfig"]
        assert (found["Config"]["User"], host["ReadonlyRootfs"], host["Privileged"]) == ("10001:10001", True, False)
        assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], None)
        assert found["State"]["Health"]["Status"] != "unhealthy", found["Name"]
    assert not [secret for secret in stack.secret_values() if secret in json.dumps(inspected)]
    unreachable = "import socket; socket.getaddrinfo('redis', 6379)"
    assert "gaierror" in stack.compose(
        "exec", "--no-TTY", "sandbox", "sh", "-c", f'python3 -c "{unreachable}" 2>&1 || true'
    )

    url, token = stack.page_url(), stack.token()
    assert httpx.get(url).status_code == 200
    assert httpx.get(f"{url}/api/session").status_code == 401
    assert httpx.get(f"{url}/api/session", headers={"Authorization": f"Bearer {token}"}).status_code == 200
