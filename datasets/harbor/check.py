"""Proves tasks: each one's own solution must earn the full reward, and an agent that does nothing must not.

    folder ─► task read ─► image built ─► oracle: open, solve, grade ─► empty: open, grade ─► record, a line each

A line of the record is a probe that came to its end, with the digest of the task's files and of the sandbox's settings:
a check that was killed continues, and a task that has changed is checked anew, as it is in other boxes. What failed for
want of a sandbox is reported and tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.common import append_jsonl, read_jsonl, rewrite_jsonl
from penstock.sandbox import RunResult, Sandbox, SandboxConfig, SandboxError
from penstock.sandbox.harbor import (
    SOLVE_OUTPUT,
    TEST_OUTPUT,
    HarborEnvironment,
    HarborTask,
    HarborTaskError,
    find_limit,
    find_task_folders,
    packed,
    read_task,
    solve_seconds,
    without_repeats,
)
from penstock.transfer_queue import is_reached, same_reward

AgentName = Literal["oracle", "empty"]
AGENTS: tuple[AgentName, ...] = ("oracle", "empty")
FULL = 1.0
Report = Callable[[str], None]
Builder = Callable[[HarborTask], Awaitable[None]]
"""Makes the image of a task if it is not there yet. Raises `SandboxError`."""


@dataclass(frozen=True, slots=True)
class TaskTrial:
    """One agent's run of one task; a line of the record."""

    task: str
    digest: str
    agent: AgentName
    reward: float | None
    cause: str = ""
    """The reason why the reward is missing or differs from the expected one."""
    limits: Sequence[str] = ()
    """Limits of the box that its scripts met, with the settings to raise."""
    seconds: float = 0.0
    solution_output: str = ""
    """The end of what solve.sh wrote."""
    tests_output: str = ""
    """The end of what the tests wrote."""

    @property
    def right(self) -> bool:
        if self.reward is None:
            return False
        return is_reached(self.reward, FULL) == (self.agent == "oracle")

    @property
    def problem(self) -> str:
        """Describes a probe that is not `right`, in a line."""
        return self.verdict + (f": {self.cause}" if self.cause else "")

    @property
    def verdict(self) -> str:
        """The reward and the one that was expected."""
        result = "no reward" if self.reward is None else f"reward {self.reward:g}"
        required = "its own solution must earn 1" if self.agent == "oracle" else "doing nothing must earn less than 1"
        return f"{self.agent}: {result}, {required}"


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """The trials of one task, and what follows from them."""

    task: str
    probes: Mapping[str, TaskTrial]
    cause: str = ""
    """Why it was not run; empty where both agents were."""
    ignored: tuple[str, ...] = ()
    """Keys of its file that are read by neither Harbor nor Penstock, a sentence each."""

    @property
    def sound(self) -> bool:
        return not self.cause and all(name in self.probes and self.probes[name].right for name in AGENTS)

    @property
    def problem(self) -> str:
        """The problem in one line, each cause once; empty if the task is sound."""
        if self.cause:
            return self.cause
        wrong = [self.probes[name] for name in AGENTS if not self.probes[name].right]
        texts, causes, limits = [], set[str](), dict[str, None]()
        for one in wrong:
            is_known = one.cause in causes or (one.limits and limits.keys() >= set(one.limits))
            texts.append(one.verdict if is_known else one.problem)
            causes.add(one.cause)
            limits.update(dict.fromkeys(one.limits))
        return "; ".join((*texts, *limits))


def check_config(backend: str, image: str, concurrency: int) -> SandboxConfig:
    """Boxes for tasks that say nothing of their limits. Raises `ValidationError` for an unknown backend."""
    limits = {"memory_mb": 2048, "tmp_mb": 512, "cpu_s": 3600, "cpus": 2.0, "pids": 512, "own_root": True}
    return SandboxConfig.model_validate({"backend": backend, "image": image, "max_boxes": concurrency, **limits})


class Checker:
    """Runs what the record lacks, `concurrency` tasks at once."""

    def __init__(
        self,
        sandbox: Sandbox,
        record: Path,
        build: Builder,
        passed: Mapping[str, str],
        *,
        boxes: str = "",
        concurrency: int = 1,
        report: Report = lambda text: None,
    ) -> None:
        """`boxes`: the settings of the sandbox; a result counts for equal ones alone."""
        self._sandbox = sandbox
        self._boxes = boxes
        self._record = record
        self._build = build
        self._passed = passed
        self._turns = asyncio.Semaphore(concurrency)
        self._report = report
        self._known: dict[tuple[str, str, str], TaskTrial] = {}

    async def check(self, folders: Sequence[Path], *, again: bool = False) -> list[CheckedTask]:
        """Check tasks, and return them in the order of `folders`. `again`: whatever the record says."""
        record: dict[tuple[str, str, str], TaskTrial] = {}
        for one in self._recorded():
            record[one.task, one.digest, one.agent] = one
        self._record.parent.mkdir(parents=True, exist_ok=True)
        rewrite_jsonl(self._record, [asdict(one) for one in record.values()])  # without a line that was cut short
        self._known = {} if again else record
        ended = 0

        async def check_in_turn(folder: Path) -> CheckedTask:
            nonlocal ended
            async with self._turns:
                result = await self._check(folder)
            ended += 1
            self._report(f"{ended} of {len(folders)}: {result.task}: {result.problem or 'sound'}")
            return result

        return list(await asyncio.gather(*map(check_in_turn, folders)))

    def _recorded(self) -> list[TaskTrial]:
        """Return the recorded trials. Of two lines of the same probe the later one counts. Raises `HarborTaskError`."""
        try:
            return [TaskTrial(**line) for line in read_jsonl(self._record)]
        except TypeError as error:
            raise HarborTaskError(f"{self._record} is no record of a check ({error}): name another --record") from error

    async def _check(self, folder: Path) -> CheckedTask:
        """Never raises for what a task does: the others are checked whatever this one is."""
        probes: dict[str, TaskTrial] = {}
        try:
            task = await asyncio.to_thread(read_task, folder)
            digest = await asyncio.to_thread(digest_of, folder, self._boxes)
            missing = [name for name in AGENTS if (task.name, digest, name) not in self._known]
            if missing:
                await self._build(task)
            for name in AGENTS:
                known = self._known.get((task.name, digest, name))
                probes[name] = known or await self._run(task, digest, name)
        except (HarborTaskError, SandboxError, OSError) as error:
            return CheckedTask(folder.name, probes, str(error).removeprefix(f"task {folder.name}: "))
        return CheckedTask(task.name, probes, ignored=task.ignored)

    async def _run(self, task: HarborTask, digest: str, agent: AgentName) -> TaskTrial:
        """Raises `SandboxError`: it says nothing of the task, and is not recorded."""
        self._report(f"{task.name}: {agent} …")
        started = time.monotonic()
        trial = await run_agent(self._sandbox, task, agent, self._passed)
        probe = replace(trial, digest=digest, seconds=round(time.monotonic() - started, 2))
        append_jsonl(self._record, [asdict(probe)])
        return probe


async def run_agent(sandbox: Sandbox, task: HarborTask, agent: AgentName, passed: Mapping[str, str]) -> TaskTrial:
    """Run one agent in a fresh box and grade it. Raises `SandboxError`, `HarborTaskError`."""
    environment = await HarborEnvironment.open(sandbox, task, f"check {task.name} {agent}", passed)
    try:
        how, solution, limit = "", "", ""
        if agent == "oracle":  # its status counts for nothing, as with Harbor
            result = await environment.solve()
            solution = await _last_output(environment, SOLVE_OUTPUT)
            if result.exit_code != 0:
                how, limit = f"its solution {_end_of(result, task)}", find_limit(solution, result)
        grade = await environment.grade()
        if how and not (limit and limit == grade.limit):  # else the tests' output shows the cause
            how = f"{how}: {without_repeats(solution[-400:])}".rstrip(": ")
        why_none = grade.cause or grade.why_none()
        cause = "; ".join(filter(None, (why_none, "" if same_reward(grade.reward, FULL) else how)))
        tests = await _last_output(environment, TEST_OUTPUT)
        limits = tuple(dict.fromkeys(filter(None, (limit, grade.limit))))
        return TaskTrial(
            task.name, "", agent, grade.reward, cause, limits, solution_output=solution, tests_output=tests
        )
    finally:
        await environment.close()


def _end_of(result: RunResult, task: HarborTask) -> str:
    if result.exit_code is not None:
        return f"ended with status {result.exit_code}"
    if result.limit == "wall":
        return f"was ended by its time limit of {solve_seconds(task):g} s, agent.timeout_sec"
    return f"was ended by the box's limit of {result.limit}"


async def _last_output(environment: HarborEnvironment, path: str) -> str:
    """The end of a file of the box; empty if the box cannot say it: the grade counts without."""
    try:
        return await environment.output_of(path, 2000)
    except SandboxError:
        return ""


def digest_of(folder: Path, boxes: str = "") -> str:
    """Return a digest of all files of a task and of what says where it runs. Raises `OSError`."""
    return hashlib.sha256(packed(folder) + boxes.encode()).hexdigest()[:16]


def select(folder: Path, names: Sequence[str]) -> list[Path]:
    """The tasks' folders, those of `names` alone if it is not empty. Raises `HarborTaskError`."""
    folders = find_task_folders(folder)
    unknown = sorted(set(names) - {one.name for one in folders})
    if unknown:
        raise HarborTaskError(f"{folder} has no task {unknown[0]}; it has {', '.join(one.name for one in folders)}")
    return [one for one in folders if not names or one.name in names]
