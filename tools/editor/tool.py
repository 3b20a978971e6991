"""The tool itself: one command per call, on a file of the box."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from penstock.sandbox import SandboxError, Session
from penstock.tools.base import ToolInfraError, ToolResult
from penstock.tools.editor.history import History, is_unchanged
from penstock.tools.editor.text import EditError, around, insert_after, line_range, numbered, replace_once
from penstock.tools.episode_box import BoxTool, EpisodeBox

MAX_FILE_BYTES = 1 << 20
NEEDS = {"create": ("text",), "replace": ("old_text", "text"), "insert": ("line", "text")}


class EditorTool(BoxTool):
    """Each command answers with the lines it is about; a command that does not fit changes nothing."""

    name = "editor"
    description = (
        "View and edit files. view: a file (with lines: a part) or folder; create: a new file with text; "
        "replace: old_text, which must occur once, by text; insert: text after line; undo: the last edit of path."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "replace", "insert", "undo"]},
            "path": {"type": "string"},
            "text": {"type": "string"},
            "old_text": {"type": "string"},
            "line": {"type": "integer", "minimum": 0},
            "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
        "required": ["command", "path"],
    }

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        command = arguments["command"]
        missing = [name for name in NEEDS.get(command, ()) if name not in arguments]
        if missing:
            return _error(f"{command} needs {' and '.join(missing)}")
        if not arguments["path"] or "\0" in arguments["path"]:
            return _error("path is empty or holds a NUL character")
        try:
            session = await state.session()
            return await self._do(session, command, posixpath.join(state.folder, arguments["path"]), arguments)
        except EditError as error:
            return _error(str(error))
        except OSError as error:
            return _error(f"{arguments['path']}: {error.strerror or error}")
        except SandboxError as error:
            raise ToolInfraError("sandbox", str(error)) from error

    async def _do(self, session: Session, command: str, path: str, arguments: Mapping[str, Any]) -> ToolResult:
        path = posixpath.normpath(path)
        if command == "view":
            return await self._view(session, path, arguments.get("lines"))
        if command == "create":
            return await self._create(session, path, arguments["text"])
        if command == "undo":
            return await self._undo(session, path)
        return await self._edit(session, path, arguments)

    async def _view(self, session: Session, path: str, lines: list[int] | None) -> ToolResult:
        try:
            text = await _read(session, path)
        except (PermissionError, IsADirectoryError):
            return await self._list(session, path)
        if not text:
            return ToolResult(f"{path} is empty")
        return ToolResult(numbered(text, *line_range(text, lines, path)))

    async def _list(self, session: Session, path: str) -> ToolResult:
        listing = await session.run(["ls", "-1Ap", "--", f"{path}/"], timeout_s=self.run_timeout_s)
        if listing.exit_code != 0:
            raise EditError(f"{path} cannot be read: it is no file, and no folder that may be listed")
        names = [name for name in listing.stdout.splitlines() if not name.startswith(".penstock_")]
        return ToolResult("\n".join(names) or f"{path} is an empty folder")

    async def _create(self, session: Session, path: str, text: str) -> ToolResult:
        if await _read_if_there(session, path) is not None:
            raise EditError(f"{path} exists already; use replace or insert to change it")
        folder = posixpath.dirname(path)
        if folder:
            await session.run(["mkdir", "-p", "--", folder], timeout_s=self.run_timeout_s)
        await _write(session, path, text)
        await History(session, path).push(None, text)
        return ToolResult(f"created {path} ({len(text.splitlines())} lines)")

    async def _edit(self, session: Session, path: str, arguments: Mapping[str, Any]) -> ToolResult:
        before, new = await _read(session, path), arguments["text"]
        if arguments["command"] == "replace":
            after, line = replace_once(before, arguments["old_text"], new, path)
        else:
            after, line = insert_after(before, arguments["line"], new, path)
        await _write(session, path, after)
        await History(session, path).push(before, after)
        return ToolResult(f"{path} now reads:\n{around(after, line, new)}")

    async def _undo(self, session: Session, path: str) -> ToolResult:
        history = History(session, path)
        step = await history.pop()
        if step is None:
            raise EditError(f"there is no edit of {path} to undo")
        before, after = step
        if not is_unchanged(await _read_if_there(session, path), after):
            raise EditError(f"{path} was changed since by something else; undo would lose that")
        if before is None:
            await session.run(["rm", "-f", "--", path], timeout_s=self.run_timeout_s)
            return ToolResult(f"removed {path}, which create had made")
        await _write(session, path, before)
        return ToolResult(f"undone: the last edit of {path}")


async def _read(session: Session, path: str) -> str:
    """Raises `OSError` as open() would, and `EditError` for what is no text of bearable size."""
    try:
        data = await session.read_file(path, MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise EditError(f"{path} was not found") from None
    if len(data) > MAX_FILE_BYTES:
        raise EditError(f"{path} is larger than {MAX_FILE_BYTES} bytes: too large for the editor")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise EditError(f"{path} is not UTF-8 text") from None


async def _read_if_there(session: Session, path: str) -> str | None:
    try:
        data = await session.read_file(path, MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    return data.decode("utf-8", "replace")


async def _write(session: Session, path: str, text: str) -> None:
    """Raises `EditError` where the text is too large, or holds half a surrogate pair, which no file can."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise EditError("text holds a character that is no Unicode text (half a surrogate pair)") from None
    if len(data) > MAX_FILE_BYTES:
        raise EditError(f"{path} would be larger than {MAX_FILE_BYTES} bytes")
    await session.write_file(path, data)


def _error(message: str) -> ToolResult:
    return ToolResult(f"Error: {message}", is_error=True)
