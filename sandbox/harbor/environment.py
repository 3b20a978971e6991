"""A task open in a box: set up as Harbor's container is, worked in, solved by its own solution, graded by its tests.

    open ─► entry point, files, health check ─► agent, or `solve` ─► `grade`: /tests in, test.sh, reward file out

Grading is Harbor's: in the agent's own box, as root, after the agent; the script's status counts for nothing. A reward
file that is missing, empty or not a number counts as no reward, never a 0.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.common import Backoff, retry
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.harbor.box_limits import DISK, find_limit, without_repeats
from penstock.sandbox.harbor.packing import packed
from penstock.sandbox.harbor.task import HarborTask, HarborTaskError, resolved
from penstock.sandbox.protocol import (
    ENTRYPOINT_VARIABLE,
    WORKDIR_VARIABLE,
    RunResult,
    Sandbox,
    SandboxError,
    Session,
)
from penstock.sandbox.session import put_folder

SET_UP_S = 120.0
"""The entry point of an image; making folders takes no time."""
HOUSEKEEPING_S = 60.0
WHILE_FULL, WAITS_WHILE_FULL = Backoff(0.5, 4.0), 10
ROOM = 8
"""Processes that tests may start at once, at least: where one of them cannot start, a box is full."""
LEAST_PIDS = ROOM + 2
"""`sandbox.pids` of a box that can be graded: the box's first process, the shell, and these."""
REWARD_JSON, REWARD_TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
TEST_OUTPUT = "/logs/verifier/test-stdout.txt"
PATCH_FILE = "/tmp/.penstock_harbor.patch"  # noqa: S108 - the box's own
SOLVE_OUTPUT = "/logs/agent/oracle.txt"
_GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null"


def check_pids(config: SandboxConfig) -> None:
    """Raises `HarborTaskError` if no box of these settings can be graded. A server's boxes have the server's."""
    if config.backend != "remote" and config.pids < LEAST_PIDS:
        raise HarborTaskError(
            f"sandbox.pids is {config.pids}: a task's tests need room for {ROOM} processes, which is {LEAST_PIDS} with"
            " the box's own: set sandbox.pids=64 or more"
        )


def solve_seconds(task: HarborTask) -> float:
    """The time limit of its own solution."""
    return task.agent_timeout_s or 3600.0


@dataclass(frozen=True, slots=True)
class HarborGrade:
    """The result of a task's tests in a box."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Empty if there is none."""
    cause: str = ""
    """Why there is none."""
    seconds: float = 0.0
    limit: str = ""
    """The limit of the box that the tests met, with the setting to raise, if that may be why."""

    @property
    def reward(self) -> float | None:
        """The one called ``reward``, else the only one."""
        if "reward" in self.rewards:
            return self.rewards["reward"]
        return next(iter(self.rewards.values())) if len(self.rewards) == 1 else None

    def why_none(self) -> str:
        """Empty if there is a reward."""
        if self.reward is not None:
            return ""
        if self.cause or not self.rewards:
            return "; ".join(filter(None, (self.cause, self.limit)))
        return f"it has several rewards and none is called 'reward': {', '.join(self.rewards)}"


class HarborEnvironment:
    """Made by `open`, or by `around` on a session in which another process opened it. The maker closes it."""

    def __init__(self, task: HarborTask, session: Session, folder: str, life: str, passed: Mapping[str, str]) -> None:
        self.task = task
        self.session = session
        self._life = life
        self.folder = folder
        """The working directory in the box, absolute."""
        where = f"task {task.name}"
        self.variables = resolved(task.variables, passed, f"{where}: environment.env")
        """Variables of everything in it, in addition to the image's own."""
        self._verifier_variables = resolved(task.verifier_variables, passed, f"{where}: verifier.env")
        self._solution_variables = resolved(task.solution_variables, passed, f"{where}: solution.env")
        self._base_commit = ""
        """HEAD of the repository in the working directory, before the agent."""
        self._image_has_tests = True
        """True if /tests may be the image's own: what an agent puts there is removed before the task's tests come."""

    @classmethod
    async def open(
        cls, sandbox: Sandbox, task: HarborTask, label: str = "", passed: Mapping[str, str] | None = None
    ) -> HarborEnvironment:
        """A fresh box of the task, set up. `passed`: variables of this machine that tasks may read.

        Raises:
            SandboxError: the box failed, or may not be had as the task asks (`NoSuchImage`, `UnmetNeeds`).
            HarborTaskError: it cannot be set up.
        """
        session = await sandbox.start(label or task.name, image=task.image, needs=task.needs)
        try:
            environment = await cls.around(session, task, passed)
            await environment._set_up()
        except BaseException:
            await session.close()
            raise
        return environment

    @classmethod
    async def around(
        cls, session: Session, task: HarborTask, passed: Mapping[str, str] | None = None
    ) -> HarborEnvironment:
        """The environment that `open` made in this session."""
        return cls(task, session, *await _located(session, task), passed or {})

    async def run(
        self, command: str, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> RunResult:
        """A shell command in the working directory."""
        argv = self._with_variables(["sh", "-c", command], variables)
        return await self.session.run(argv, timeout_s=timeout_s, cwd=self.folder)

    async def solve(self) -> RunResult:
        """The task's own solution, as an agent that is right. Raises `HarborTaskError` if it has none."""
        if not self.task.has_solution:
            raise HarborTaskError(f"task {self.task.name}: it has no solution: nothing proves that it can be solved")
        script = self.task.solve_script
        more = {"solve.sh": script} if script is not None else {}
        await self._put("/solution", await asyncio.to_thread(packed, self.task.solution, more), "solution")
        variables = {"DEBIAN_FRONTEND": "noninteractive", **self._solution_variables}
        return await self._script("/solution/solve.sh", SOLVE_OUTPUT, solve_seconds(self.task), variables)

    async def patch(self) -> bytes | None:
        """Return the changes in the repository of the working directory since the box was opened; None without one.

        With a separate index: the repository's stays as the agent left it. Raises `SandboxError`.
        """
        if not self._base_commit:
            return None
        diff = (
            'cd -- "$1" && export GIT_INDEX_FILE="$3.index" && rm -f "$GIT_INDEX_FILE" && '
            f'{_GIT} read-tree "$2" && {_GIT} add -A && {_GIT} diff --cached --binary "$2" >"$3"'
        )
        argv = _shell(diff, self.folder, self._base_commit, PATCH_FILE)
        result = await self.session.run(argv, timeout_s=HOUSEKEEPING_S)
        if result.exit_code != 0:
            return None
        try:
            return await self.session.read_file(PATCH_FILE, 16 << 20)
        except OSError:
            return None

    async def grade(self) -> HarborGrade:
        """Grade by the task's tests, in this box. Raises `SandboxError`, `HarborTaskError`.

        Where the agent broke a limit that took the whole box, a fresh one is set up: it earns what doing nothing earns.
        """
        started = time.monotonic()
        try:
            # What the agent left running may hold every process that the box may have, for some seconds yet.
            life = await retry(self._life_with_room, WHILE_FULL, retries=WAITS_WHILE_FULL, on=HarborTaskError)
        except HarborTaskError as error:
            return HarborGrade(cause=self._without_name(error))
        if life != self._life:
            self._life = life
            await self._set_up()
        forget = f"rm -rf {REWARD_JSON} {REWARD_TEXT} {TEST_OUTPUT} && mkdir -p /logs/verifier"
        if not self._image_has_tests:
            empty = "[ ! -L /tests ] && [ ! -f /tests ] || rm -f /tests; rm -rf /tests/* /tests/.[!.]* /tests/..?*; "
            forget = empty + forget
        result = await self.session.run(_shell(forget), timeout_s=HOUSEKEEPING_S)
        if result.exit_code != 0:
            end = _end_of(result)
            return HarborGrade(cause=f"old reward files cannot be removed: {end}", limit=find_limit(end, result))
        script = {"test.sh": self.task.test_script} if self.task.test_script is not None else {}
        try:
            await self._put("/tests", await asyncio.to_thread(packed, self.task.tests, script), "tests")
        except HarborTaskError as error:  # the agent may have broken the box: that is not a failure of the task
            cause, limit = self._without_name(error), find_limit(str(error))
            return HarborGrade({}, cause.removesuffix(f"; {limit}"), time.monotonic() - started, limit)
        ran = await self._script("/tests/test.sh", TEST_OUTPUT, self.task.verifier_timeout_s, self._verifier_variables)
        rewards, cause = await self._rewards(ran)
        return HarborGrade(rewards, cause, time.monotonic() - started, find_limit(cause, ran) if cause else "")

    async def output_of(self, path: str, characters: int = 400) -> str:
        """The end of a file of the box; empty if there is none. Raises `SandboxError`."""
        result = await self.session.run(["tail", "-c", str(characters), path], timeout_s=HOUSEKEEPING_S)
        return result.stdout.strip() if result.exit_code == 0 else ""

    async def close(self) -> None:
        await self.session.close()

    # ---- set up

    async def _set_up(self) -> None:
        logs = "/logs/agent /logs/verifier /logs/artifacts"
        has_tests = '[ -n "$(ls -A /tests 2>/dev/null)" ] || echo none; '
        result = await self.session.run(_shell(f"{has_tests}mkdir -p {logs} && chmod 777 {logs}"), timeout_s=SET_UP_S)
        _require(result, self.task, "its folders of logs cannot be made")
        self._image_has_tests = not result.stdout.startswith("none")
        name = ENTRYPOINT_VARIABLE
        enter = f'[ -z "${name}" ] || {{ cd -- "$1"; eval "set -- ${name}"; exec "$@" true; }}'
        entered = await self.session.run(self._with_variables(_shell(enter, self.folder)), timeout_s=SET_UP_S)
        _require(entered, self.task, "the image's entry point failed")
        if self.task.uploads is not None:
            files = await asyncio.to_thread(packed, self.task.uploads)
            await self._put(self.folder, files, "environment")
        await self._wait_until_healthy()
        head = _shell(f'cd -- "$1" && {_GIT} rev-parse --verify HEAD 2>/dev/null', self.folder)
        commit = await self.session.run(head, timeout_s=HOUSEKEEPING_S)
        self._base_commit = commit.stdout.strip() if commit.exit_code == 0 else ""

    async def _wait_until_healthy(self) -> None:
        """Failures within the start period do not count. Raises `HarborTaskError`."""
        check = self.task.healthcheck
        if check is None:
            return
        started, failures = time.monotonic(), 0
        while True:
            result = await self.run(check.command, check.timeout_s)
            if result.exit_code == 0:
                return
            starting = time.monotonic() - started < check.start_period_s
            failures += not starting
            if failures >= max(1, check.retries):
                raise HarborTaskError(f"task {self.task.name}: its health check fails: {_end_of(result)}")
            await asyncio.sleep(check.start_interval_s if starting else check.interval_s)

    # ---- parts

    async def _life_with_room(self) -> str:
        """The box's life. Raises `HarborTaskError` if it has no room for what tests start."""
        _, life = await _located(self.session, self.task)
        start_some = f"for n in {' '.join(map(str, range(ROOM)))}; do sleep 0.2 & done; wait"
        result = await self.session.run(_shell(start_some), timeout_s=HOUSEKEEPING_S)
        _require(result, self.task, f"sandbox.pids leaves no room for {ROOM} more processes in its box: raise it")
        return life

    def _without_name(self, error: HarborTaskError) -> str:
        """The message alone: the reader of a grade names the task."""
        return str(error).removeprefix(f"task {self.task.name}: ")

    def _with_variables(self, argv: list[str], more: Mapping[str, str] | None = None) -> list[str]:
        variables = {**self.variables, **(more or {})}
        return ["env", *(f"{name}={value}" for name, value in variables.items()), *argv] if variables else argv

    async def _script(self, path: str, output: str, timeout_s: float, variables: Mapping[str, str]) -> RunResult:
        """Run a script whose output goes to a file: it may be long."""
        argv = _shell('cd -- "$1" && chmod +x "$2" && exec "$2" >"$3" 2>&1', self.folder, path, output)
        return await self.session.run(self._with_variables(argv, variables), timeout_s=timeout_s)

    async def _put(self, path: str, tar: bytes, what: str) -> None:
        try:
            await put_folder(self.session, path, tar)
        except OSError as error:
            if error.errno == errno.ENOSPC or find_limit(str(error)) == DISK:
                raise HarborTaskError(f"task {self.task.name}: no room for its {what} at {path}; {DISK}") from error
            raise HarborTaskError(
                f"task {self.task.name}: {what} ({len(tar)} bytes) cannot be put into the box at {path}: {error}"
            ) from error

    async def _rewards(self, ran: RunResult) -> tuple[Mapping[str, float], str]:
        """(rewards, why there are none)"""
        if ran.limit == "wall":
            return {}, f"its tests ran longer than {self.task.verifier_timeout_s:g} s"
        for path in (REWARD_JSON, REWARD_TEXT):
            try:
                text = (await self.session.read_file(path, 1 << 20)).decode("utf-8", "replace")
            except OSError:
                continue
            try:
                if not text:
                    raise ValueError("it is empty")
                return (_of_json(text) if path == REWARD_JSON else {"reward": _finite(float(text))}), ""
            except (ValueError, OverflowError, RecursionError) as error:  # an agent may have written anything there
                return {}, f"{path}: {error}"
        try:
            last_words = without_repeats(await self.output_of(TEST_OUTPUT)) or "they wrote nothing"
        except SandboxError as error:
            last_words = str(error)
        return {}, f"its tests wrote no reward to {REWARD_TEXT} or {REWARD_JSON} ({_end_of(ran)}): {last_words}"


async def _located(session: Session, task: HarborTask) -> tuple[str, str]:
    """(the working directory, which is made; the box's life). Raises `SandboxError`, `HarborTaskError`."""
    # When the box's first process started: a box that takes the place of one that is gone has another.
    life = "cut -d ' ' -f 22 /proc/1/stat"
    enter = f'w="${{1:-${{{WORKDIR_VARIABLE}:-/app}}}}"; mkdir -p -- "$w" && cd -- "$w" && pwd -P && {life}'
    result = await session.run(_shell(enter, task.workdir or ""), timeout_s=HOUSEKEEPING_S)
    _require(result, task, f"its working directory {task.workdir or ''} cannot be made")
    folder, started = result.stdout.rstrip("\n").rsplit("\n", 1)
    return folder, started


def _shell(script: str, *arguments: str) -> list[str]:
    return ["sh", "-c", script, "harbor", *arguments]


def _of_json(text: str) -> dict[str, float]:
    """Raises `ValueError`."""
    content = json.loads(text)
    rewards = content if isinstance(content, dict) else {"reward": content}
    if not rewards:
        raise ValueError("it names no reward")
    return {str(name): _finite(value) for name, value in rewards.items()}


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _require(result: RunResult, task: HarborTask, what: str) -> None:
    if result.exit_code != 0:
        raise HarborTaskError(f"task {task.name}: {what}: {_end_of(result)}")


def _end_of(result: RunResult) -> str:
    words = (result.stderr or result.stdout).strip()[-400:]
    return words or (f"limit {result.limit}" if result.exit_code is None else f"status {result.exit_code}")
