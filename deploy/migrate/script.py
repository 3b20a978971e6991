"""Reads the settings of a shell script, which is never run: the words ``a.b=value`` of its commands.

Variables, arrays, defaults (``${X:-y}``) and sums (``$((a * 2))``) of the script are put in. Of the environment only
``HOME`` is read. What a command would print (``$(date)``) is not known and stays as it is written, except the folder of
the script and the working directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
_ELEMENT = re.compile(r"\$\{(\w+)\[(\d+)\]\}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OWN_FOLDER = re.compile(
    r"(?:dirname(?:\$0|\$\{?BASH_SOURCE(?:\[0\]\})?\}?)|cd\$\(dirname(?:\$0|\$\{?BASH_SOURCE(?:\[0\]\})?\}?)\)"
    r"(?:>/dev/null(?:2>&1)?)?&&pwd(?:-P)?)"
)
_CONDITION, _END = re.compile(r"\s*if\b"), re.compile(r"\s*fi\b")
_ESAC = re.compile(r"\s*esac\b")
_CASE, _ARM = re.compile(r"\s*case\s+(.+?)\s+in\b", re.DOTALL), re.compile(r"\s*([^\s()|]+(?:\s*\|\s*[^\s()|]+)*)\s*\)")
_SOURCE = re.compile(r"\s*(?:source|\.)\s+(.+?)\s*", re.DOTALL)
_TEST, _LOOP = re.compile(r"\s*(?:\[|test\b)"), re.compile(r"\s*(?:for|select)\b")
_KEYWORD = re.compile(r"\A\s*(?:(?:then|else|elif|do|!|\{)\s+)+")
_PROGRAM = re.compile(r"(?:^|/)python[\d.]*$|\.py$|(?:^|\.)main_\w+$")
_MODULE = re.compile(r"(?:\w+[./])+(?:main_\w+|\w+_main|\w+_trainer)(?:\.py)?")
_CONFIG = re.compile(r"(?:--config-(path|dir|name)|-(cp|cd|cn))(?:=(.*))?", re.DOTALL)
CONFIG_PATH, CONFIG_NAME = "--config-path", "--config-name"
"""hydra's options among the settings of a command: the YAML file that the settings are laid over."""
GROUPS = ("model_engine",)
"""Settings without a dot that are no variables of a script: hydra's groups."""
GPU_ARMS = ("gpu", "cuda")


@dataclass(slots=True)
class _Case:
    """A ``case`` that is being read."""

    chosen: str | None
    """The patterns of the one branch that is read; None: it is not known which one runs, all are read."""
    depth: int
    """The ``if`` around it: at its end they are as many again, even if a branch lacks a ``fi``."""
    is_read: bool = True
    """The branch at the place that is read counts."""


class ShellScript:
    """The variables and arrays of a script while it is read."""

    def __init__(self, folder: Path) -> None:
        """`folder` has the script."""
        self._folder = folder
        self._variables = {"HOME": str(Path.home())}
        self._arrays: dict[str, list[tuple[str, bool]]] = {}
        """Words, and whether each may not be there when the script runs."""
        self._uncertain = set[str]()
        """Variables that a branch sets, or one that follows from such a variable."""
        self._in_branch = False
        self._cases: list[_Case] = []
        self._depth = 0
        """The ``if`` around the place that is read."""
        self.uncertain: dict[str, str] = {}
        """Settings whose values come from a branch that may not run."""
        self.notes: list[str] = []
        """Branches that were chosen by their names, and files that are not here."""
        self.program = ""
        """The module that the script starts, as a dotted path."""
        self._sourced = set[Path]()
        """Files that were read already: one may name itself."""
        self.missing = set[str]()
        """Arrays among the words of a run that nothing sets."""

    def read(self, text: str) -> dict[str, str]:
        """Return dotted key → text of its value. Raises `ValueError` for a quotation that has no end, and for a script
        that starts several runs."""
        runs, others = list[dict[str, str]](), dict[str, str]()
        commands = list(_commands(text))
        for place, (command, is_guarded) in enumerate(commands):
            rest = self._follow_case(command, [later for later, _ in commands[place:]])
            if not all(case.is_read for case in self._cases):
                continue
            self._depth += (_CONDITION.match(rest) is not None) - (_END.match(rest) is not None)
            self._in_branch = is_guarded or self._depth > 0 or any(case.chosen is None for case in self._cases)
            plain = _KEYWORD.sub("", rest)
            if _LOOP.match(plain):
                continue
            if sourced := _SOURCE.fullmatch(plain):
                commands[place + 1 : place + 1] = self._commands_of(sourced[1], is_guarded)
                continue
            if array := _ARRAY.fullmatch(plain):
                before = self._arrays.get(array[1], []) if array[2] else []
                self._arrays[array[1]] = [*before, *self._words(array[3])]
                continue
            settings, is_run = self._read_command(plain)
            if is_run and settings:
                runs.append(settings)
            others |= settings
        if len(runs) > 1:
            raise ValueError(f"it starts {len(runs)} runs, perhaps in branches of an `if`: keep one of them")
        read = runs[0] if runs else others
        self.uncertain = {key: value for key, value in self.uncertain.items() if read.get(key) == value}
        return read

    def _commands_of(self, words: str, is_guarded: bool) -> list[tuple[str, bool]]:
        """The commands of a file that ``source`` names; one that is not here is noted."""
        name, *_ = map(self._expanded, self._split(words))
        file = next((one for one in (Path(name), self._folder / name) if one.is_file()), None)
        if file is None:
            self.notes.append(f"source {name}: no such file here, so what it sets is not known")
        if file is None or file in self._sourced:
            return []
        self._sourced.add(file)
        return [(one, is_guarded or guard) for one, guard in _commands(file.read_text(encoding="utf-8"))]

    def _follow_case(self, command: str, following: Sequence[str]) -> str:
        """The command without what begins a ``case`` or one of its branches; `following` are it and all later ones."""
        if opened := _CASE.match(command):
            self._cases.append(_Case(self._chosen_arm(opened[1], _arms(following)), self._depth, is_read=False))
            command = command[opened.end() :]
        if self._cases and _ESAC.match(command):
            self._depth = self._cases.pop().depth
        elif self._cases and (arm := _ARM.match(command)):
            case = self._cases[-1]
            case.is_read = case.chosen in (None, arm[1])
            command = command[arm.end() :]
        return command

    def _chosen_arm(self, word: str, arms: Sequence[str]) -> str | None:
        """The branch that bash takes by the script's variables; one for GPUs where that is not known."""
        names = {match[1] or match[3] for match in _VARIABLE.finditer(word)}
        value = " ".join(self._expanded(one) for one in self._split(word))
        if "$" not in value and "`" not in value and names.isdisjoint(self._uncertain):
            patterns = [(arm, one.strip().strip("\"'")) for arm in arms for one in arm.split("|")]
            return next((arm for arm, pattern in patterns if fnmatchcase(value, pattern)), "")
        chosen = next((arm for arm in arms if arm.strip("\"'") in GPU_ARMS), None)
        if chosen is not None:
            self.notes.append(f"of the branches of `case {word}` the one of {chosen} is read")
        return chosen

    def _read_command(self, command: str) -> tuple[dict[str, str], bool]:
        """(the settings in a command's words, whether it runs Python); its assignments are made."""
        settings, is_run = {}, False
        words = self._words(command)
        for word, is_uncertain in words:
            setting, assignment = SETTING.fullmatch(word), _ASSIGNMENT.fullmatch(word)
            if setting and ("." in setting[1] or setting[1] in GROUPS):
                settings[setting[1]] = setting[2]
                if is_uncertain:
                    self.uncertain[setting[1]] = setting[2]
            elif assignment:
                start = self._variables.get(assignment[1], "") if assignment[2] else ""
                self._variables[assignment[1]] = start + assignment[3]
                (self._uncertain.add if is_uncertain else self._uncertain.discard)(assignment[1])
            elif is_run and (option := _CONFIG.fullmatch(word)):
                key = CONFIG_NAME if (option[1] or option[2]) in ("name", "cn") else CONFIG_PATH
                settings[key] = option[3] if option[3] is not None else next(words, ("", False))[0]
                if is_uncertain:
                    self.uncertain[key] = settings[key]
            else:
                is_run = is_run or _PROGRAM.search(word) is not None
                if _MODULE.fullmatch(word):
                    self.program = word.replace("/", ".").removesuffix(".py")
        if is_run:
            arrays = (match for word in self._split(command) if (match := _ELEMENTS.fullmatch(word)))
            self.missing |= {match[0] for match in arrays if match[1] not in self._arrays}
        return settings, is_run

    def _words(self, command: str) -> Iterator[tuple[str, bool]]:
        """The words of a command, each put in when it is asked for: an earlier one may set its variable; and whether
        a branch decides about it.

        As in bash, what is put in is not looked at again, and has several words only outside of a setting.
        """
        for word in self._split(command):
            if elements := _ELEMENTS.fullmatch(word):
                yield from ((one, self._in_branch or follows) for one, follows in self._arrays.get(elements[1], []))
                continue
            expanded = self._expanded(word)
            names = {match[1] or match[3] for match in _VARIABLE.finditer(word)}
            is_uncertain = self._in_branch or not names.isdisjoint(self._uncertain)
            if expanded == word or SETTING.fullmatch(word) or _ASSIGNMENT.fullmatch(word):
                yield expanded, is_uncertain
            else:
                yield from ((one, is_uncertain) for one in expanded.split())

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

        def put_element(match: re.Match[str]) -> str:
            words = self._arrays.get(match[1], [])
            return words[int(match[2])][0] if int(match[2]) < len(words) else match[0]

        return _VARIABLE.sub(put, _ELEMENT.sub(put_element, text))

    def _summed(self, text: str) -> str:
        """Sums of whole numbers; what is more than arithmetic stays as it is written."""

        def put(match: re.Match[str]) -> str:
            plain = _NAME.sub(lambda name: self._variables.get(name[1], name[0]), self._expanded(match[1]))
            try:
                return str(int(evaluate(canonical(plain.replace(" ", "")))))
            except BadExpression:
                return match[0]

        return re.sub(r"\$\(\((.+?)\)\)(?!\))", put, text)


def _arms(commands: Sequence[str]) -> list[str]:
    """The patterns of the ``case`` that the first command opens, without those of inner ones."""
    arms, depth = [], 0
    for command in commands:
        opened = _CASE.match(command)
        depth += (opened is not None) - (_ESAC.match(command) is not None)
        if depth == 0:
            break
        if depth == 1 and (arm := _ARM.match(command[opened.end() :] if opened else command)):
            arms.append(arm[1])
    return arms


def _commands(text: str) -> Iterator[tuple[str, bool]]:
    """The commands without comments, and whether a test with ``&&`` or ``||`` stands before each. A line break in
    quotes, in brackets or behind a backslash ends none."""
    command, depth, is_guarded = "", 0, False
    for match in _TOKEN.finditer(text + "\n"):
        piece = match[0]
        if match["comment"] is not None:
            continue
        joins = not depth and command.endswith(piece) and piece in ("&", "|")
        if joins or (piece in ("\n", ";") and not depth):
            ended = command[:-1] if joins else command
            yield ended, is_guarded
            is_guarded = joins and (is_guarded or _TEST.match(ended) is not None)
            command = ""
            continue
        depth = max(0, depth + (piece == "(") - (piece == ")"))
        command += " " if piece == "\\\n" else piece
    yield command, is_guarded
