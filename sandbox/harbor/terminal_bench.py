"""A task folder of Terminal-Bench's older format, if it means exactly the same as a folder of Harbor's.

task.yaml, Dockerfile, docker-compose.yaml (one container), run-tests.sh, tests/, solution.sh

The mapping is that of Harbor's own converter: the status of run-tests.sh is the reward, /tests holds the tests, and
the compose file's variables, folder and entry point become lines of the Dockerfile. What Harbor keeps as a compose
file, and what it drops in silence although it decides the grade, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.sandbox.harbor.packing import BuildContext
from penstock.sandbox.harbor.task import DEFAULT_BUILD_S, HarborTask, HarborTaskError

OLD_CONFIG = "task.yaml"
DEFAULT_AGENT_S, DEFAULT_TESTS_S = 360.0, 60.0
COMPOSE = "docker-compose.yaml"
_REWARD = """
_EXIT_CODE=$?
if [ $_EXIT_CODE -eq 0 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
exit $_EXIT_CODE
"""


def read_terminal_bench(folder: Path) -> HarborTask:
    """Raises `HarborTaskError`."""
    return _Reader(folder).task()


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = self._yaml(OLD_CONFIG)

    def task(self) -> HarborTask:
        self._refuse_unsupported()
        script = self.folder / "run-tests.sh"
        if not script.is_file():
            raise self.error("run-tests.sh is missing: nothing would grade it")
        instruction = self.config.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip():
            raise self.error(f"{OLD_CONFIG}: instruction is missing or empty")
        build = self._build()
        solution = self.folder / "solution.sh"
        tests = script.read_text(encoding="utf-8").replace("$TEST_DIR", "/tests")
        return HarborTask(
            name=self.folder.name,
            folder=self.folder,
            instruction=instruction.strip(),
            image=build.image_name(self.folder.name),
            build=build,
            build_timeout_s=DEFAULT_BUILD_S,
            agent_timeout_s=self._seconds("max_agent_timeout_sec", DEFAULT_AGENT_S),
            verifier_timeout_s=self._seconds("max_test_timeout_sec", DEFAULT_TESTS_S),
            tests=self.folder / "tests",
            test_script=(tests if tests.endswith("\n") else tests + "\n").encode() + _REWARD.encode(),
            solve_script=solution.read_bytes() if solution.is_file() else None,
        )

    def error(self, text: str) -> HarborTaskError:
        return HarborTaskError(f"task {self.folder.name}: {text}")

    def _yaml(self, name: str) -> dict[str, Any]:
        try:
            content = yaml.safe_load((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise self.error(f"{name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise self.error(f"{name} must be a mapping")
        return content

    def _seconds(self, name: str, usual: float) -> float:
        seconds = self.config.get(name, usual)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
            raise self.error(f"{OLD_CONFIG}: {name} must be a number of seconds, found {seconds!r}")
        return float(seconds)

    def _refuse_unsupported(self) -> None:
        parser = self.config.get("parser_name", "pytest")
        unsupported = {
            "solution.yaml (a solution typed into a terminal)": (self.folder / "solution.yaml").exists(),
            "run_tests_in_same_shell": bool(self.config.get("run_tests_in_same_shell")),
            f"parser_name {parser}: only the status of run-tests.sh counts here, as with pytest": parser != "pytest",
        }
        for what, is_there in unsupported.items():
            if is_there:
                raise self.error(f"{what} cannot be mapped to a Harbor task exactly: take the task out of its folder")

    def _build(self) -> BuildContext:
        service = self._service()
        context, dockerfile = self._context(service)
        folder = (self.folder / context).resolve()
        if not folder.is_relative_to(self.folder.resolve()):
            raise self.error(f"{COMPOSE}: build.context {context!r} is outside of the task's folder")
        path = folder / dockerfile
        if not path.is_file():
            raise self.error(f"{path.relative_to(self.folder.resolve())} is missing: a box needs an image")
        text = path.read_text(encoding="utf-8")
        ours = (OLD_CONFIG, COMPOSE, "solution.sh", "run-tests.sh", "tests") if context == "." else ()
        left_out = [name for name in ours if not _copies(text, name)]
        lines = "\n".join(["", "ENV TEST_DIR=/tests", *self._dockerfile_lines(service), ""])
        return BuildContext(folder, text.rstrip("\n") + "\n" + lines, frozenset(left_out))

    def _service(self) -> Mapping[str, Any]:
        """The one container of the compose file; an empty one if there is only a Dockerfile."""
        if not (self.folder / COMPOSE).is_file():
            return {}
        compose = self._yaml(COMPOSE)
        services = compose.get("services") or {}
        strange = [key for key in compose if key not in ("services", "version")]
        if strange:
            raise self.error(f"{COMPOSE}: {strange[0]} cannot be mapped to one container")
        if len(services) != 1:
            raise self.error(f"{COMPOSE}: {len(services)} services ({', '.join(services)}); one container is supported")
        (service,) = services.values()
        known = {"build", "image", "container_name", "command", "environment", "working_dir", "expose", "entrypoint"}
        if strange := [key for key in service if key not in known | {"volumes"}]:
            raise self.error(f"{COMPOSE}: {strange[0]} cannot be mapped to a Dockerfile")
        logs = {
            "${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}",
            "${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}",
        }
        if not set(map(str, service.get("volumes", ()))) <= logs:
            raise self.error(f"{COMPOSE}: its volumes cannot be mapped to one container")
        checked: Mapping[str, Any] = service
        return checked

    def _context(self, service: Mapping[str, Any]) -> tuple[str, str]:
        """(folder, Dockerfile in it)"""
        build = service.get("build") or "."
        if isinstance(build, str):
            return build, "Dockerfile"
        strange = [key for key in build if key not in ("context", "dockerfile")]
        if strange:
            raise self.error(f"{COMPOSE}: build.{strange[0]} cannot be mapped to a Dockerfile")
        return str(build.get("context", ".")), str(build.get("dockerfile", "Dockerfile"))

    def _dockerfile_lines(self, service: Mapping[str, Any]) -> list[str]:
        lines = []
        environment = service.get("environment") or []
        if isinstance(environment, dict):
            environment = [f"{name}={value}" for name, value in environment.items()]
        for pair in environment:
            if pair == "TEST_DIR=${T_BENCH_TEST_DIR}":
                continue
            name, is_set, value = str(pair).partition("=")
            if not is_set or "${" in value:
                raise self.error(f"{COMPOSE}: environment {name} is a variable of the machine, which tasks do not see")
            lines.append(f"ENV {name}={json.dumps(value)}")
        if folder := service.get("working_dir"):
            lines.append(f"WORKDIR {folder}")
        if entrypoint := service.get("entrypoint"):
            words = entrypoint if isinstance(entrypoint, list) else [entrypoint]
            lines.append(f"ENTRYPOINT {json.dumps([str(word) for word in words])}")
        return lines


def _copies(dockerfile: str, name: str) -> bool:
    """True if the Dockerfile copies `name` into the image, although it is one of the task's own files."""
    return any(f"{verb} {place}{name}" in dockerfile for verb in ("COPY", "ADD") for place in ("", "./"))
