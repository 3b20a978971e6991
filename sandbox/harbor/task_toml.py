"""A task folder of Harbor, read as it is: `task.toml` (schema 1.4), instruction, image or Dockerfile, tests, solution.

What a task may say and this cannot do exactly is refused by its name: several containers, several steps, devices,
other users than root, a verifier in a separate container.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.common import nearest
from penstock.sandbox.harbor.packing import BuildContext
from penstock.sandbox.harbor.task import (
    DEFAULT_BUILD_S,
    DEFAULT_VERIFIER_S,
    HarborTask,
    HarborTaskError,
    Healthcheck,
)
from penstock.sandbox.protocol import BoxNeeds

CONFIG = "task.toml"
TEST_SCRIPT, SOLVE_SCRIPT = "test.sh", "solve.sh"
_PHASE = {"timeout_sec", "user", "network_mode", "allowed_hosts"}
KEYS = {
    "agent": frozenset(_PHASE),
    "verifier": frozenset(_PHASE | {"env", "environment_mode", "environment", "collect"}),
    "environment": frozenset(
        {"build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu"}
        | {"mcp_servers", "env", "skills_dir", "healthcheck", "workdir", "network_mode", "allowed_hosts"}
        | {"allow_internet", "memory", "storage"}
    ),
}
"""All keys of Harbor in these tables, those that are not read here among them."""
TOP_LEVEL = frozenset(
    {*KEYS, "schema_version", "version", "task", "metadata", "solution", "source", "artifacts", "steps"}
    | {"multi_step_reward_strategy", "multi_step_reward_mode"}
)
"""Tables and keys of Harbor at the top of the file."""
ELSEWHERE = {"environment.pids": ": set sandbox.pids in the recipe, the processes of every box"}
"""Keys that Harbor lacks and the setting here that has their meaning."""


def read_harbor(folder: Path) -> HarborTask:
    """Raises `HarborTaskError`."""
    return _Reader(folder).task()


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: dict[str, Any] = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"{CONFIG} cannot be read: {error}") from error
        self.environment = self._table("environment")

    def task(self) -> HarborTask:
        self._refuse_unsupported()
        try:
            instruction = (self.folder / "instruction.md").read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise self.error(f"instruction.md cannot be read: {error}") from error
        if not instruction:
            raise self.error("instruction.md is empty: it must say what to do")
        tests, solution = self.folder / "tests", self.folder / "solution"
        if not (tests / TEST_SCRIPT).is_file():
            raise self.error(f"tests/{TEST_SCRIPT} is missing: nothing would grade it")
        if solution.is_dir() and not (solution / SOLVE_SCRIPT).is_file():
            raise self.error(f"solution/ has no {SOLVE_SCRIPT}")
        image, build, uploads = self._image()
        agent, verifier = self._table("agent"), self._table("verifier")
        return HarborTask(
            name=self.folder.name,
            folder=self.folder,
            instruction=instruction,
            image=image,
            build=build,
            uploads=uploads,
            build_timeout_s=self._number(self.environment, "environment", "build_timeout_sec") or DEFAULT_BUILD_S,
            workdir=self._text(self.environment, "environment", "workdir"),
            needs=self._needs(),
            agent_timeout_s=self._number(agent, "agent", "timeout_sec"),
            verifier_timeout_s=self._number(verifier, "verifier", "timeout_sec") or DEFAULT_VERIFIER_S,
            variables=self._variables(self.environment, "environment"),
            verifier_variables=self._variables(verifier, "verifier"),
            solution_variables=self._variables(self._table("solution"), "solution"),
            tests=tests,
            solution=solution if solution.is_dir() else None,
            healthcheck=self._healthcheck(),
            ignored=tuple(self._ignored()),
        )

    def _ignored(self) -> Iterator[str]:
        for name, value in self.config.items():
            if name not in TOP_LEVEL:
                what = f"[{name}] is not a table" if isinstance(value, dict) else f"{name} is not a key"
                yield f"{what} of Harbor and is ignored{nearest(name, TOP_LEVEL)}"
        for table, known in KEYS.items():
            for key in self._table(table):
                if key not in known:
                    fix = ELSEWHERE.get(f"{table}.{key}") or nearest(key, known)
                    yield f"{table}.{key} is not a key of Harbor and is ignored{fix}"

    def error(self, text: str) -> HarborTaskError:
        return HarborTaskError(f"task {self.folder.name}: {text}")

    def _image(self) -> tuple[str | None, BuildContext | None, Path | None]:
        """(its name, what makes it, files for its working directory)"""
        folder = self.folder / "environment"
        named = self._text(self.environment, "environment", "docker_image")
        if named:
            has_definition = (folder / "Dockerfile").is_file()
            return named, None, folder if folder.is_dir() and not has_definition and any(folder.iterdir()) else None
        if not (folder / "Dockerfile").is_file():
            return None, None, folder if folder.is_dir() and any(folder.iterdir()) else None
        build = BuildContext(folder, (folder / "Dockerfile").read_text(encoding="utf-8"))
        return build.image_name(self.folder.name), build, None

    def _needs(self) -> BoxNeeds:
        memory, storage = self._size("memory"), self._size("storage")
        cpus = self._number(self.environment, "environment", "cpus")
        return BoxNeeds(own_root=True, memory_mb=memory, cpus=cpus, storage_mb=storage)

    def _size(self, name: str) -> int | None:
        """Return a size in MiB; ``memory = "2G"`` is the older way to write ``memory_mb = 2048``."""
        number = self._number(self.environment, "environment", f"{name}_mb")
        written = self.environment.get(name)
        if number is not None or written is None:
            return int(number) if number is not None else None
        match = re.fullmatch(r"([\d.]+)([GMK])", str(written).strip(), re.IGNORECASE)
        if match is None:
            raise self.error(f"environment.{name} must be a size as 2G or 512M, found {written!r}")
        megabytes = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[match[2].upper()]
        return max(1, int(float(match[1]) * megabytes))

    def _healthcheck(self) -> Healthcheck | None:
        table = self.environment.get("healthcheck")
        if table is None:
            return None
        if not isinstance(table, dict) or not isinstance(table.get("command"), str):
            raise self.error("environment.healthcheck must have a command")
        names = {"interval_sec": "interval_s", "timeout_sec": "timeout_s", "start_period_sec": "start_period_s"}
        names["start_interval_sec"] = "start_interval_s"
        where = "environment.healthcheck"
        times = {ours: self._number(table, where, theirs) for theirs, ours in names.items() if theirs in table}
        retries = {"retries": int(self._number(table, where, "retries") or 0)} if "retries" in table else {}
        settings: dict[str, Any] = {name: value for name, value in times.items() if value is not None}
        return Healthcheck(table["command"], **settings, **retries)

    def _refuse_unsupported(self) -> None:
        """Raises `HarborTaskError`. Each is something that would change what the task is."""
        environment, agent, verifier = self.environment, self._table("agent"), self._table("verifier")
        files = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")
        compose = [name for name in files if (self.folder / "environment" / name).is_file()]
        mode = verifier.get("environment_mode", "separate" if "environment" in verifier else "shared")
        unsupported = {
            f"environment/{compose[0] if compose else ''}: several containers": bool(compose),
            "steps: a task of several steps": bool(self.config.get("steps")),
            "environment.gpus": bool(environment.get("gpus")),
            "environment.tpu": bool(environment.get("tpu")),
            f"environment.os {environment.get('os')}": str(environment.get("os") or "linux").lower() != "linux",
            "environment.mcp_servers": bool(environment.get("mcp_servers")),
            "environment.skills_dir": bool(environment.get("skills_dir")),
            "verifier.environment_mode separate: a separate container for the verifier": mode != "shared",
            "verifier.collect": bool(verifier.get("collect")),
            f"agent.user {agent.get('user')}: another user than root": not _is_root(agent.get("user")),
            f"verifier.user {verifier.get('user')}: another user than root": not _is_root(verifier.get("user")),
        }
        for what, is_there in unsupported.items():
            if is_there:
                raise self.error(f"{what} is not supported: take it out of task.toml, or the task out of its folder")

    def _table(self, name: str) -> dict[str, Any]:
        table = self.config.get(name, {})
        if not isinstance(table, dict):
            raise self.error(f"[{name}] must be a table")
        return table

    def _text(self, table: Mapping[str, Any], where: str, name: str) -> str | None:
        value = table.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{where}.{name} must be text, found {value!r}")
        return value or None

    def _number(self, table: Mapping[str, Any], where: str, name: str) -> float | None:
        value = table.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{where}.{name} must be a number, found {value!r}")
        if not 0 <= value < float("inf"):
            raise self.error(f"{where}.{name} must be a positive number, found {value!r}")
        return float(value)

    def _variables(self, table: Mapping[str, Any], where: str) -> dict[str, str]:
        variables = table.get("env", {})
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            raise self.error(f"{where}.env must map names to texts")
        return dict(variables)


def _is_root(user: Any) -> bool:
    return user in (None, "root", "0", 0)
