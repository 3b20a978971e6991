"""`agent.settings` of the loop `command`, and the placeholders in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.agent_loops import InfraFailure
from penstock.common import nearest
from penstock.transfer_queue import Task

FILES = "files"
"""Column of a row: path → text of files that lie in the program's folder when it starts."""
OF_TASK = frozenset({"task_id", "prompt", "system", "messages"})
OF_BOX = frozenset({"base_url", "anthropic_base_url", "api_key", "model", "folder", "home", "prompt_file"})
"""Placeholders of every episode; a row's plain columns are others."""
# The shell's ``${name}`` and JSON's braces are left alone.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


class CommandSettings(BaseModel):
    """`agent.settings` of `command`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | list[str] = Field(
        description="The program: a list of arguments, or a line for `sh`, in which placeholders are quoted."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables in addition to the endpoint's own; an empty value removes one."
    )
    files: dict[str, str] = Field(
        default_factory=dict, description="Files written before the start: path (`~/…`, or in its folder) → text."
    )
    stdin: str = Field("", description="Text on its standard input.")
    folder: str = Field(
        "", description="Its folder. Empty: that of the recipe's `swe` or `harbor` tools' task, else an empty folder."
    )
    image: str | None = Field(None, description="Image of the box. Unset: the row's `sandbox_image`, else the default.")
    collect: list[str] = Field(
        default_factory=list,
        description="Files read after its end, for the reward and `extra.program.files`; up to 1 MiB of each.",
    )
    max_seconds: float | None = Field(
        None, gt=0, description="It is ended after so long. Unset: nine tenths of `agent.episode_deadline_s`."
    )
    max_requests: int = Field(1000, gt=0, description="HTTP requests of any kind, and connections; one more ends it.")
    max_request_mb: int = Field(512, gt=0, description="Bodies of its requests together, in MiB; more ends it.")
    on_failure: Literal["policy_error", "infra_error"] = Field(
        "policy_error",
        description="An exit status other than 0 after answers: graded, or tried again without a reward.",
    )


class Placeholders:
    """Values by name: those of the endpoint, the task's messages, and the plain columns of its row."""

    def __init__(self, task: Task, extra: Mapping[str, str]) -> None:
        self._values = {
            **plain_columns(task.extra_info),
            "task_id": task.task_id,
            "prompt": "\n\n".join(texts_of(task.messages, "user")),
            "system": "\n\n".join(texts_of(task.messages, "system")),
            "messages": json.dumps(list(task.messages), ensure_ascii=False, default=str),
            **extra,
        }

    def fill(self, text: str, where: str, *, quoted: bool = False, code: bool = False) -> str:
        """`text` with its placeholders. Raises `InfraFailure`.

        Args:
            quoted: each as one word of a shell.
            code: `text` may have other names in braces, which stay.
        """

        def value(match: re.Match[str]) -> str:
            name = match[1]
            if name not in self._values:
                if code:
                    return match[0]
                raise InfraFailure("loop", not_a_placeholder(name, where, self._values))
            return shlex.quote(self._values[name]) if quoted else self._values[name]

        return _PLACEHOLDER.sub(value, text)

    def argv(self, command: str | Sequence[str]) -> list[str]:
        if isinstance(command, str):
            return ["sh", "-c", self.fill(command, "command", quoted=True)]
        return [self.fill(part, "command") for part in command]


def plain_columns(extra_info: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a row that are placeholders: texts and numbers."""
    return {name: str(value) for name, value in extra_info.items() if isinstance(value, str | int | float)}


def columns_named(settings: CommandSettings) -> dict[str, str]:
    """Placeholders that only a column of the rows can be → the first setting that has each."""
    command = settings.command if isinstance(settings.command, str) else "\n".join(settings.command)
    texts = {"command": command, "stdin": settings.stdin}
    texts |= {f"environment.{name}": text for name, text in settings.environment.items()}
    columns: dict[str, str] = {}
    for where, text in texts.items():
        for name in _PLACEHOLDER.findall(text):
            if name not in OF_TASK | OF_BOX:
                columns.setdefault(name, where)
    return columns


def unknown_placeholder(settings: CommandSettings, rows: Iterable[Mapping[str, Any]]) -> str:
    """Name a placeholder that none of these rows' `extra_info` has; empty if each has a value in some row."""
    columns = {name for row in rows for name in plain_columns(row)}
    unknown = [(name, where) for name, where in columns_named(settings).items() if name not in columns]
    return not_a_placeholder(*unknown[0], OF_TASK | OF_BOX | columns) if unknown else ""


def not_a_placeholder(name: str, where: str, known: Iterable[str]) -> str:
    return f"agent.settings.{where}: {{{name}}} is not a placeholder{nearest(name, known)}"


def texts_of(messages: Sequence[Mapping[str, Any]], role: str) -> list[str]:
    """The text of each message of `role`."""
    contents = [message.get("content") for message in messages if message.get("role") == role]
    return [
        content
        if isinstance(content, str)
        else "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        for content in contents
        if content
    ]


def files_of(task: Task) -> dict[str, bytes]:
    """Returns the files of the row, by path. Raises `InfraFailure` that names the mistake."""
    column = task.extra_info.get(FILES) or {}
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except ValueError as error:
            raise InfraFailure("task", f"column {FILES} of {task.task_id} is not valid JSON: {error}") from error
    if not isinstance(column, Mapping):
        raise InfraFailure("task", f"column {FILES} of {task.task_id} must map paths to texts")
    files = {str(path): content for path, content in column.items() if content is not None}
    for path, content in files.items():
        if not isinstance(content, str | bytes):
            raise InfraFailure("task", f"column {FILES} of {task.task_id}: {path} is not a text")
    return {path: content if isinstance(content, bytes) else content.encode() for path, content in files.items()}
