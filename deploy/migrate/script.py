"""Reads the settings of a shell script, which is never run: the words ``a.b=value`` of its commands.

Variables, arrays, defaults (``${X:-y}``) and sums (``$((a * 2))``) of the script are put in. Of the environment only
``HOME`` is read. What a command would print (``$(date)``) is not known and stays as it is written, except the folder of
the script and the working directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.datasets import BadExpression, canonical, evaluate

COMMAND = re.compile(r"\$\((?!\()(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
"""A command whose output would be put in."""
_TOKEN = re.compile(
    rf"""\\.|'[^']*'|"(?:\\.|{COMMAND.pattern}|[^"\\])*"|{COMMAND.pattern}|(?P<comment>(?<![^\s;(])\#[^\n]*)|.""",
    re.DOTALL,
)
SETTING = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)
"""One setting in hydra's words: its dotted key and the text of its value."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:(?:export|local|readonly|declare(?:\s+-\w+)*)\s+)?(\w+)(\+?)=\((.*)\)\s*", re.DOTALL)
_ELEMENTS = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OWN_FOLDER = re.compile(
    r"(?:dirname(?:\$0|\$\{?BASH_SOURCE(?:\[0\]\})?\}?)|cd\$\(dirname(?:\$0|\$\{?BASH_SOURCE(?:\[0\]\})?\}?)\)"
    r"(?:>/dev/null(?:2>&1)?)?&&pwd(?:-P)?)"
)
_CONDITION, _END = re.compile(r"\s*(?:if|case)\b"), re.compile(r"\s*(?:fi|esac)\b")
GROUPS = ("model_engine",)
"""Settings without a dot that are no variables of a script: hydra's groups."""


class ShellScript:
    """The variables and arrays of a script while it is read."""

    def __init__(self, folder: Path) -> None:
        """`folder` has the script."""
        self._folder = folder
        self._variables = {"HOME": str(Path.home())}
        self._arrays: dict[str, list[str]] = {}
        self._depth = 0
        """Conditions around the present command."""
        self.conditional = list[str]()
        """Variables, arrays and settings that a branch of an ``if`` or ``case`` sets: the last branch counts."""

    def read(self, text: str) -> dict[str, str]:
        """Return dotted key → text of its value. Raises `ValueError` for a quotation that has no end, and for a script
        that starts several runs."""
        runs = list[dict[str, str]]()
        for command in _commands(text):
            self._depth += _CONDITION.match(command) is not None
            self._depth -= _END.match(command) is not None
            if array := _ARRAY.fullmatch(command):
                before = self._arrays.get(array[1], []) if array[2] else []
                self._arrays[array[1]] = [*before, *self._words(array[3])]
                self._note_branch([array[1]])
            elif settings := self._read_command(command):
                runs.append(settings)
                self._note_branch(settings)
        if len(runs) > 1:
            raise ValueError(f"it starts {len(runs)} runs, perhaps in branches of an `if`: keep one of them")
        return runs[0] if runs else {}

    def _read_command(self, command: str) -> dict[str, str]:
        """The settings in a command's words; its assignments are made."""
        settings = {}
        for word in self._words(command):
            setting, assignment = SETTING.fullmatch(word), _ASSIGNMENT.fullmatch(word)
            if setting and ("." in setting[1] or setting[1] in GROUPS):
                settings[setting[1]] = setting[2]
            elif assignment:
                start = self._variables.get(assignment[1], "") if assignment[2] else ""
                self._variables[assignment[1]] = start + assignment[3]
                self._note_branch([assignment[1]])
        return settings

    def _note_branch(self, names: Iterable[str]) -> None:
        if self._depth:
            self.conditional += [name for name in names if name not in self.conditional]

    def _words(self, command: str) -> Iterator[str]:
        """The words of a command, each put in when it is asked for: an earlier one may set its variable.

        As in bash, what is put in is not looked at again, and has several words only outside of a setting.
        """
        for word in self._split(command):
            if elements := _ELEMENTS.fullmatch(word):
                yield from self._arrays.get(elements[1], [])
                continue
            expanded = self._expanded(word)
            if expanded == word or SETTING.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
                yield expanded
            else:
                yield from expanded.split()

    def _split(self, command: str) -> list[str]:
        """The words as they are written; what another command would print is one of them, or a part of one."""
        outputs: list[str] = []

        def put(match: re.Match[str]) -> str:
            outputs.append(self._output(match[0]))
            return f"\0{len(outputs) - 1}\0"

        words = shlex.split(self._summed(COMMAND.sub(put, command)))
        return [re.sub("\0(\\d+)\0", lambda match: outputs[int(match[1])], word) for word in words]

    def _output(self, command: str) -> str:
        plain = re.sub(r'["\s]|--', "", command.strip("`").removeprefix("$(").removesuffix(")"))
        if _OWN_FOLDER.fullmatch(plain):
            return str(self._folder)
        return str(Path.cwd()) if plain == "pwd" else command

    def _expanded(self, text: str) -> str:
        """Variables that the script does not set stay as they are written, to be seen in the recipe."""

        def put(match: re.Match[str]) -> str:
            name, default = match[1] or match[3], match[2]
            return self._variables.get(name, match[0] if default is None else self._expanded(default))

        return _VARIABLE.sub(put, text)

    def _summed(self, text: str) -> str:
        """Sums of whole numbers; what is more than arithmetic stays as it is written."""

        def put(match: re.Match[str]) -> str:
            plain = _NAME.sub(lambda name: self._variables.get(name[1], name[0]), match[1])
            try:
                return str(int(evaluate(canonical(plain.replace(" ", "")))))
            except BadExpression:
                return match[0]

        return re.sub(r"\$\(\((.+?)\)\)(?!\))", put, text)


def _commands(text: str) -> Iterator[str]:
    """The commands without comments. A line break in quotes, in brackets or behind a backslash ends none."""
    command, depth = list[str](), 0
    for match in _TOKEN.finditer(text + "\n"):
        piece = match[0]
        if match["comment"] is not None:
            continue
        if piece in ("\n", ";") and not depth:
            yield "".join(command)
            command = []
            continue
        depth = max(0, depth + (piece == "(") - (piece == ")"))
        command.append(" " if piece == "\\\n" else piece)
    yield "".join(command)
