"""`agent.loop: command`: any program, run once per episode in a box, whose requests to its model are recorded.

    box ─► files, endpoint ─► program ──API──► CommandSession ─► journal, segments
                                  └─► end: status, output, files ─► outcome ─► the task's reward

The box has no network: the program reaches the API of its episode by a port of the box's loopback, which the
sandbox's driver carries to this process. docs/extend/loop.md has the outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from penstock.agent_loops import (
    TRUNCATED_DEADLINE,
    TRUNCATED_LENGTH,
    AgentLoopOutput,
    EpisodeJournal,
    EpisodeRestart,
    InfraFailure,
    WorkerServices,
    span,
)
from penstock.agent_loops.loops import read_settings
from penstock.gateway.command.box import ProgramBox, ProgramEnd, TimeLimit
from penstock.gateway.command.session import CommandSession, EpisodeEndpoint
from penstock.gateway.command.settings import CommandSettings, Placeholders, files_of
from penstock.gateway.finish import last_turn, outcome_of
from penstock.gateway.recorded_loop import MODEL, RecordedLoop
from penstock.gateway.session import GatewaySession
from penstock.gateway.sessions import handle_of
from penstock.sandbox import SandboxError, ServedSession, Session
from penstock.transfer_queue import COMPLETED, Lease, Outcome, OutcomeKind, Task

SHARE_OF_DEADLINE = 0.9
"""Share of the episode's deadline for the program. The rest is for reading files: past the deadline the box is gone."""
TAIL = 4000
"""Characters of each output that a trajectory keeps."""
PROMPT = "~/prompt.txt"


class CommandLoop(RecordedLoop):
    """Runs `agent.settings.command` (`CommandSettings`)."""

    settings_kind = CommandSettings
    needs_sandbox: ClassVar[bool] = True
    session_kind: ClassVar[type[GatewaySession]] = CommandSession
    recorded: CommandSession

    def equip(self, services: WorkerServices, lease: Lease, journal: EpisodeJournal) -> None:
        super().equip(services, lease, journal)
        self._deadline_s = services.config.episode_deadline_s
        self._handle = handle_of(lease.episode_id, lease.fence)
        self._own_session: Session | None = None
        self._time_limits: list[TimeLimit] = []

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        settings = read_settings(CommandSettings, self)
        for_program_s = self._deadline_s * SHARE_OF_DEADLINE
        setting = f"{SHARE_OF_DEADLINE:g} of agent.episode_deadline_s"
        self._time_limits = [TimeLimit(setting, for_program_s, time.monotonic() + for_program_s)]
        try:
            box = await self._open_box(task, settings)
            end = await self._run_program(box, task, settings)
        except SandboxError as error:
            raise InfraFailure("sandbox", str(error)) from error
        return self._outputs(end, settings)

    async def teardown(self) -> None:
        if self._own_session is not None:
            await self._own_session.close()

    # the box -------------------------------------------------------------------------------------------------------
    async def _open_box(self, task: Task, settings: CommandSettings) -> ProgramBox:
        """Open the box of the recipe's tools, so that they grade the files in it; else a separate box."""
        shared = await self.tools.episode_box()
        if shared is not None:
            session, folder, variables = await shared.session(), shared.folder, shared.variables
            ends_at = time.monotonic() + shared.seconds_left
            self._time_limits.append(TimeLimit("the task's agent.timeout_sec", shared.time_limit_s, ends_at))
        else:
            if self.sandbox is None:
                raise InfraFailure("sandbox", "the loop `command` runs its program in a box, and the run has none")
            image = settings.image or task.extra_info.get("sandbox_image") or None
            session = self._own_session = await self.sandbox.start(task.task_id, image=image)
            folder, variables = "", {}
        return await ProgramBox.open(_as_served_session(session), settings.folder or folder, variables)

    async def _run_program(self, box: ProgramBox, task: Task, settings: CommandSettings) -> ProgramEnd:
        recorded = self.recorded
        endpoint = EpisodeEndpoint(
            recorded, self._handle, max_requests=settings.max_requests, max_bytes=settings.max_request_mb << 20
        )
        try:
            port = await box.session.open_port()
            places = Placeholders(task, self._facts(endpoint, port, box))
            await box.put(self._files(task, settings, places))
            limit = self._first_limit(settings)
            argv, stdin = places.argv(settings.command), places.fill(settings.stdin, "stdin")
            with span("tool", "program"):
                environment = _environment(settings, places)
                end = await box.run(
                    argv, environment, stdin=stdin, limit=limit, accept=endpoint.accept, stop=recorded.stop
                )
        finally:
            recorded.closing = True
            recorded.end("the program has ended")
            await endpoint.close()
            await self.close_recording()
        if recorded.diverged:
            raise EpisodeRestart(recorded.cause)
        if recorded.failure is not None:
            raise recorded.failure
        files = await box.collect(settings.collect)
        return replace(end, files=files)

    def _first_limit(self, settings: CommandSettings) -> TimeLimit:
        """The limit that ends first. Raises `InfraFailure` if it has passed."""
        now, limits = time.monotonic(), list(self._time_limits)
        if settings.max_seconds:
            own = TimeLimit("agent.settings.max_seconds", settings.max_seconds, now + settings.max_seconds)
            limits.append(own)
        first = min(limits, key=lambda limit: limit.ends_at)
        if first.ends_at <= now:
            raise InfraFailure("sandbox", f"no box was ready within {first.seconds:g} s, {first.setting}: raise it")
        return first

    def _facts(self, endpoint: EpisodeEndpoint, port: int, box: ProgramBox) -> dict[str, str]:
        base_url, anthropic_base_url = endpoint.urls(port)
        return {
            "base_url": base_url,
            "anthropic_base_url": anthropic_base_url,
            "api_key": endpoint.key,
            "model": MODEL,
            "folder": box.folder,
            "home": box.home,
            "prompt_file": f"{box.home}/{PROMPT.removeprefix('~/')}",
        }

    def _files(self, task: Task, settings: CommandSettings, places: Placeholders) -> dict[str, bytes]:
        """The row's, the settings', and the prompt."""
        of_settings = {
            path: places.fill(text, f"files.{path}", code=True).encode() for path, text in settings.files.items()
        }
        return {PROMPT: places.fill("{prompt}", "prompt").encode(), **files_of(task), **of_settings}

    # the end -------------------------------------------------------------------------------------------------------
    def _outputs(self, end: ProgramEnd, settings: CommandSettings) -> list[AgentLoopOutput]:
        recorded = self.recorded
        if last_turn(recorded) is None:
            refused = f"; its last request was refused: {recorded.last_refusal}" if recorded.last_refusal else ""
            problem = (
                "every request of the program failed" if recorded.requests else "the program never asked the model"
            )
            raise InfraFailure("agent", f"{problem}{refused}; {recorded.cause or end.describe()}")
        outcome = self._outcome(end, settings)
        self.check_replayed()
        result = end.result
        program = {
            "exit_code": result.exit_code,
            "limit": result.limit,
            "cause": recorded.cause,
            "stdout": result.stdout[-TAIL:],
            "stderr": result.stderr[-TAIL:],
            "files": dict(end.files),
            "collect": list(settings.collect),
            "refused": list(recorded.refusals),
        }
        metrics = {
            "program_seconds": end.seconds,
            "program_requests": float(recorded.requests),
            "program_refusals": float(len(recorded.refusals)),
        }
        return self.recorded_outputs(outcome, metrics=metrics, extra={"program": program})

    def _outcome(self, end: ProgramEnd, settings: CommandSettings) -> Outcome:
        """Return the outcome by the budget, by the cause of the program's end, by its status. Raises `InfraFailure`."""
        budget = outcome_of(self.recorded, None)
        if self.recorded.facts.get("truncated"):
            return budget
        if self.recorded.cause:
            return Outcome(OutcomeKind.POLICY_ERROR, f"the program was ended: {self.recorded.cause}")
        if end.result.limit == "wall":
            return TRUNCATED_DEADLINE
        if end.result.limit is not None and end.result.exit_code is None:
            return Outcome(OutcomeKind.POLICY_ERROR, f"the program was ended: {end.describe()}")
        if end.result.exit_code == 0:
            return budget
        return self._outcome_of_status(end, settings, budget)

    def _outcome_of_status(self, end: ProgramEnd, settings: CommandSettings, budget: Outcome) -> Outcome:
        """Return the outcome of a status other than 0. After answers of the model, its code may have caused any
        failure.

        Raises `InfraFailure`.
        """
        if self.recorded.too_long:
            return TRUNCATED_LENGTH
        if budget != COMPLETED:
            return budget
        refusal = self.recorded.last_refusal
        cause = f"its last request was refused: {refusal}; {end.describe()}" if refusal else end.describe()
        if settings.on_failure == "infra_error":
            raise InfraFailure("agent", cause)
        return Outcome(OutcomeKind.POLICY_ERROR, cause)


def _as_served_session(session: Session) -> ServedSession:
    if getattr(session, "run_served", None) is None:
        raise InfraFailure(
            "sandbox",
            "boxes of this backend cannot reach the gateway: the loop `command` needs sandbox.backend bwrap, or docker "
            "with images that have python3",
        )
    served: Any = session
    return served


def _environment(settings: CommandSettings, places: Placeholders) -> Mapping[str, str]:
    """The endpoint under the names that clients of both APIs read, and the recipe's own."""
    usual = {
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_BASE": "{base_url}",
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_MODEL": "{model}",
        "ANTHROPIC_BASE_URL": "{anthropic_base_url}",
        "ANTHROPIC_API_KEY": "{api_key}",
        "ANTHROPIC_MODEL": "{model}",
    }
    filled = {
        name: places.fill(text, f"environment.{name}") for name, text in {**usual, **settings.environment}.items()
    }
    return {name: value for name, value in filled.items() if value}
