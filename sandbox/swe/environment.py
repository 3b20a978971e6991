"""A repository to repair, open in a box: run, apply, diff; edits come through tools that share the session."""

from __future__ import annotations

from penstock.sandbox.protocol import RunResult, Sandbox, Session
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.task import PatchError, SweLimits, SweTask, SweTaskError
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace


class SweEnvironment:
    """Made by `open`, or by `around` on a session in which another process opened it. The maker closes it."""

    def __init__(self, task: SweTask, workspace: Workspace) -> None:
        self.task = task
        self._workspace = workspace

    @classmethod
    async def open(
        cls, sandbox: Sandbox, task: SweTask, limits: SweLimits | None = None, label: str = ""
    ) -> SweEnvironment:
        """A box of the task's image with the snapshot in it, built.

        Raises:
            SandboxError: the box failed.
            SweTaskError: the task cannot be set up in it.
        """
        session = await sandbox.start(label or task.instance_id, image=task.sandbox_image)
        try:
            environment = await cls.around(session, task, limits)
            await environment._workspace.place(task)
            await environment._build()
        except BaseException:
            await session.close()
            raise
        return environment

    @classmethod
    async def around(cls, session: Session, task: SweTask, limits: SweLimits | None = None) -> SweEnvironment:
        """The environment that `open` made in this session."""
        return cls(task, await Workspace.find(session, task, limits or SweLimits()))

    @property
    def session(self) -> Session:
        return self._workspace.session

    @property
    def folder(self) -> str:
        """The repository in the box, absolute."""
        return self._workspace.folder

    @property
    def variables(self) -> dict[str, str]:
        """Variables that commands see in addition to the box's own environment."""
        return self._workspace.variables(self.task)

    async def run(self, command: str, timeout_s: float | None = None) -> RunResult:
        """A shell command in the repository; what it starts does not outlive it."""
        argv = self._workspace.in_folder(self.task, command)
        return await self.session.run(argv, timeout_s=timeout_s)

    async def apply(self, patch: bytes) -> None:
        """All of a patch, or nothing of it. Raises `PatchError` with git's words if it does not fit."""
        if not patch.strip():
            return
        try:
            await self._workspace.script(scripts.APPLY, await self._workspace.upload("apply.patch", patch))
        except ScriptFailed as error:
            raise PatchError(str(error)) from error

    async def diff(self) -> bytes:
        """Return the changes since the snapshot, exact, binary and new files too, without what git ignores.

        However the model used its own git. Repositories within the repository are left out. Raises `PatchError`
        where the patch is too large or the snapshot was destroyed (a box that ran out of memory loses its files).
        """
        limit = self._workspace.limits.patch_bytes
        try:
            await self._workspace.script(scripts.DIFF)
            patch = await self._workspace.read("diff.patch", limit + 1)
        except (ScriptFailed, OSError) as error:
            raise PatchError(f"no patch can be made of what the box holds: {error}") from error
        if len(patch) > limit:
            raise PatchError(f"the patch is larger than {limit} bytes")
        return patch

    async def close(self) -> None:
        await self.session.close()

    async def _build(self) -> None:
        if not self.task.build_command:
            return
        result = await self.run(self.task.build_command, self._workspace.limits.command_timeout_s)
        if result.exit_code != 0:
            output = (result.stdout + result.stderr)[-1000:]
            raise SweTaskError(f"task {self.task.instance_id}: its build_command failed: {output}")
