"""A stack on the real engine, and what the engine itself tells of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deploy.placements.compose.stack import Stack, make_stack

REPOSITORY = Path(__file__).parents[4]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"
BASE = "penstock-base:packages"
PROJECT_LABEL = "com.docker.compose.project"


def docker(*arguments: str, timeout_s: float = 120, check: bool = True, **options: Any) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def why_not() -> str | None:
    """What is missing for these tests, None where all is there."""
    for needed in (["version"], ["compose", "version"], ["buildx", "version"], ["image", "inspect", BASE]):
        try:
            done = subprocess.run(["docker", *needed], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return "no docker"
        if done.returncode:
            return f"`docker {' '.join(needed)}` fails"
    return None


class RunningStack:
    """`make` writes the folder, `up` starts it, `down` leaves nothing of it in the engine."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.project = f"penstock-test-{uuid.uuid4().hex[:8]}"
        self.config = make_stack(Stack(folder, RECIPE, overrides))
        settings = {
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_PROFILES": "metrics",
            "PENSTOCK_TAG": "test",
            "PENSTOCK_BASE_IMAGE": BASE,
            "PENSTOCK_REDIS_IMAGE": BASE,
            "PENSTOCK_PROMETHEUS_IMAGE": BASE,
            "PENSTOCK_PAGE_PORT": "0",
            "PENSTOCK_SHM": "256m",
        }
        env = [line for line in (folder / ".env").read_text().splitlines() if line.partition("=")[0] not in settings]
        (folder / ".env").write_text("\n".join([*env, *(f"{k}={v}" for k, v in settings.items()), ""]))

    def compose(self, *arguments: str, timeout_s: float = 400, check: bool = True) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "COMPOSE_"))}
        return docker("compose", *arguments, cwd=self.folder, env=clean, timeout_s=timeout_s, check=check)

    def up(self, *arguments: str) -> None:
        self.compose("up", "--detach", "--no-build", "--quiet-pull", *arguments)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "10")

    def containers(self, service: str, *, every: bool = False) -> list[str]:
        """Ids, oldest first; `every`: also those that do not run."""
        return self.compose("ps", "--quiet", *(["--all"] if every else []), service).split()

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("inspect", self.containers(service, every=True)[0]))
        return found[0]

    def in_role(self, service: str, *command: str, check: bool = True) -> str:
        """Beside a role, with its login."""
        return self.compose("exec", "--no-TTY", service, "with-login", *command, check=check)

    def kill_from_outside(self, service: str, *words: str) -> None:
        """SIGKILL to a process of a container, as the kernel does it; `docker kill` counts as being told to stop."""
        table = docker("top", self.containers(service)[0], "-eo", "pid,args").splitlines()[1:]
        pids = [int(line.split()[0]) for line in table if all(word in line for word in words)]
        assert pids, f"{service}: no process with {words} among\n" + "\n".join(table)
        os.kill(pids[0], signal.SIGKILL)

    def steps(self) -> int:
        metrics = self.folder / "runs" / self.config.name / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 700) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.tail()}"
            time.sleep(0.2)

    def page_url(self) -> str:
        return "http://" + self.compose("port", "page", "8600")

    def token(self) -> str:
        return (self.folder / "secrets" / "token").read_text()

    def secret_values(self) -> set[str]:
        """Every password and token of this stack."""
        found = {self.token()}
        for file in (self.folder / "secrets").glob("*_login"):
            found |= set(re.findall(r"(?:PASSWORD|TOKEN)=(\S+)", file.read_text()))
        return found

    def tail(self) -> str:
        states = self.compose("ps", "--all", check=False)
        return f"{states}\n{self.compose('logs', '--no-color', '--tail', '25', check=False)}"

    def leftovers(self) -> list[str]:
        """What the engine still has of this project."""
        label = f"label={PROJECT_LABEL}={self.project}"
        kinds = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [line for kind in kinds for line in docker(*kind, "--quiet", "--filter", label).splitlines()]
