"""The `editor` tool: view and change files of the box, one command per call, with undo."""

from __future__ import annotations

import io
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from penstock.sandbox import SandboxError, Session
from penstock.tools.base import ToolInfraError, ToolResult
from penstock.tools.episode_box import BoxTool, EpisodeBox


class EditError(Exception):
    """The edit does not fit the file; the model reads the message."""


def replace_once(text: str, old: str, new: str, path: str) -> tuple[str, int]:
    """(new text, first changed line, from 1). Raises `EditError` unless `old` occurs exactly once."""
    if not old:
        raise EditError("old_text is empty; use insert to add lines, or create for a new file")
    if old == new:
        raise EditError("old_text and text are the same: nothing would change")
    count = text.count(old)
    if count == 0:
        # Most misses are a matter of indentation: say where the passage is if white space is left out of account.
        words = old.split()
        match = re.search(r"\s+".join(map(re.escape, words)), text) if words else None
        line = text.count("\n", 0, match.start()) + 1 if match else 0
        hint = f"; at line {line} it differs in white space only: copy it exactly" if line else ""
        raise EditError(f"old_text was not found in {path}{hint}")
    if count > 1:
        starts = [match.start() for match in re.finditer(re.escape(old), text)][:5]
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts)
        more = " …" if count > len(starts) else ""
        raise EditError(
            f"old_text is not unique in {path}: it occurs {count} times, at lines {lines}{more}."
            " Give more of the lines around it"
        )
    start = text.index(old)
    return text[:start] + new + text[start + len(old) :], text.count("\n", 0, start) + 1


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends, as grep and tracebacks count them. To `splitlines` a form feed ends one too."""
    return list(io.StringIO(text))


def insert_after(text: str, line: int, new: str, path: str) -> tuple[str, int]:
    """(new text, first inserted line). `line` 0 is the top. Raises `EditError` past the end."""
    lines = lines_of(text)
    if not 0 <= line <= len(lines):
        raise EditError(f"line {line} is not in {path}: it has {len(lines)} lines (0 inserts at the top)")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    lines.insert(line, new if new.endswith("\n") else f"{new}\n")
    return "".join(lines), line + 1


def numbered(text: str, first: int, last: int) -> str:
    """Lines `first` to `last` (from 1, both in), each with its number."""
    lines = [line.rstrip("\r\n") for line in lines_of(text)]
    shown = enumerate(lines[max(1, first) - 1 : last], start=max(1, first))
    return "\n".join(f"{number:6}\t{line}" for number, line in shown)


def line_range(text: str, bounds: list[int] | None, path: str) -> tuple[int, int]:
    """The lines to show; a last line of -1 is the end. Raises `EditError` if they are not in the file."""
    count = len(lines_of(text))
    if bounds is None:
        return 1, count
    first, last = bounds[0], count if bounds[1] == -1 else bounds[1]
    if not 1 <= first <= last or first > count:
        raise EditError(f"lines {bounds[0]} to {bounds[1]} are not in {path}: it has {count} lines")
    return first, min(last, count)


MAX_BYTES = 4 << 20
"""Limit of one file's history; the oldest steps go first."""


class EditHistory:
    """The earlier texts of one file, newest last. `before` None: the edit made the file."""

    def __init__(self, session: Session, path: str) -> None:
        self._session = session
        self._file = f".penstock_editor_{xxhash.xxh3_64_hexdigest(path.encode())}"

    async def push(self, before: str | None, after: str) -> None:
        steps = [*await self._steps(), {"before": before, "after": _hash(after)}][-20:]
        await self._write(steps)

    async def pop(self, text: str | None, path: str) -> str | None:
        """Return the text before the last edit, which made `text`, and forget the edit. Raises `EditError`; the edit
        stays then."""
        steps = await self._steps()
        if not steps:
            raise EditError(f"there is no edit of {path} to undo")
        if text is None or _hash(text) != steps[-1]["after"]:
            raise EditError(f"{path} was changed since by something else; undo would lose that")
        await self._write(steps[:-1])
        return steps[-1]["before"]

    async def _steps(self) -> list[dict[str, Any]]:
        """Code in the box may have damaged the file: then there is nothing to go back to."""
        try:
            steps = json.loads(await self._session.read_file(self._file, MAX_BYTES + 1))
            return [{"before": step["before"], "after": step["after"]} for step in steps]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    async def _write(self, steps: list[dict[str, Any]]) -> None:
        data = json.dumps(steps).encode()
        while len(data) > MAX_BYTES and steps:
            steps = steps[1:]
            data = json.dumps(steps).encode()
        await self._session.write_file(self._file, data)


def _hash(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


MAX_FILE_BYTES = 1 << 20


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
        needs = {"create": ("text",), "replace": ("old_text", "text"), "insert": ("line", "text")}
        missing = [name for name in needs.get(command, ()) if name not in arguments]
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
            raise EditError(f"{path} cannot be read: it is neither a file nor a folder that may be listed")
        names = [name for name in listing.stdout.splitlines() if not name.startswith(".penstock_")]
        return ToolResult("\n".join(names) or f"{path} is an empty folder")

    async def _create(self, session: Session, path: str, text: str) -> ToolResult:
        if await _read_if_there(session, path) is not None:
            raise EditError(f"{path} exists already; use replace or insert to change it")
        folder = posixpath.dirname(path)
        if folder:
            await session.run(["mkdir", "-p", "--", folder], timeout_s=self.run_timeout_s)
        await _write(session, path, text)
        await EditHistory(session, path).push(None, text)
        return ToolResult(f"created {path} ({len(lines_of(text))} lines)")

    async def _edit(self, session: Session, path: str, arguments: Mapping[str, Any]) -> ToolResult:
        before, new = await _read(session, path), arguments["text"]
        if arguments["command"] == "replace":
            after, line = replace_once(before, arguments["old_text"], new, path)
        else:
            after, line = insert_after(before, arguments["line"], new, path)
        await _write(session, path, after)
        await EditHistory(session, path).push(before, after)
        last = line + max(new.count("\n") - new.endswith("\n"), 0)
        return ToolResult(f"{path} now reads:\n{numbered(after, line - 4, last + 4)}")

    async def _undo(self, session: Session, path: str) -> ToolResult:
        before = await EditHistory(session, path).pop(await _read_if_there(session, path), path)
        if before is None:
            await session.run(["rm", "-f", "--", path], timeout_s=self.run_timeout_s)
            return ToolResult(f"removed {path}, which create had made")
        await _write(session, path, before)
        return ToolResult(f"undone: the last edit of {path}")


async def _read(session: Session, path: str) -> str:
    """Raises `OSError` as open() would, and `EditError` if the file is not text, or too large."""
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
        raise EditError("text holds a character that is not Unicode text (half a surrogate pair)") from None
    if len(data) > MAX_FILE_BYTES:
        raise EditError(f"{path} would be larger than {MAX_FILE_BYTES} bytes")
    await session.write_file(path, data)


def _error(message: str) -> ToolResult:
    return ToolResult(f"Error: {message}", is_error=True)
