"""A command of a page against the program itself: parsed as the real command line would, nothing started."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.docs.pages import ROOT

from penstock.agent_loops import find_loop, load_object
from penstock.deploy import app, load_config, load_sandbox
from penstock.simulator import changed, of_file
from penstock.testing import FakeSandbox
from penstock.tools import make_tools

FOREIGN = frozenset(
    """. cat cd cp curl docker echo export git helm kill kubectl ls mkdir mv openssl ray redis-check-aof redis-cli rm
    [ sbatch scancel sed sh sinfo sleep source squeue srun ssh tail tar torchrun wait watch""".split()  # noqa: SIM905
)
"""Programs that are not ours: their lines are split, and no more. Pages about them are run by tests of their own."""
LEADING = {"then", "do", "else", "if", "while", "until", "!", "time", "sudo", "nohup", "exec", "{"}
CLOSING = {"fi", "done", "}", "esac"}
ASSIGNMENT = re.compile(r"^\w+=")
PLACEHOLDER = re.compile(r"^[A-Z][A-Z_0-9]*$|^…$|^<\w+>$")
SETUP = ROOT / "simulator" / "setups" / "agentic-64.yaml"
ANY_RECIPE = ROOT / "recipes" / "calculator.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Wrong(AssertionError):
    """The page says what the program does not do."""


@cache
def penstock_command() -> Any:
    """The tree of commands; making it takes a tenth of a second."""
    return typer.main.get_command(app)


def check(words: Sequence[str], folder: Path) -> None:
    """`folder` holds the page's files and is the current directory. Raises `Wrong`, `ConfigError` or `BadSetup`."""
    name, rest = words[0], list(words[1:])
    if name.startswith(("scripts/", "recipes/")):
        check_file(name, rest)
    elif name in CHECKS:
        CHECKS[name](rest, folder)
    elif name not in FOREIGN:
        raise Wrong(f"{name}: no program that pages use; fix it, add it to FOREIGN in {__file__}, or mark the block")


def check_penstock(words: list[str], folder: Path) -> None:
    words = [word.strip("[]") if word.startswith("[--") else word for word in words if word not in ("…", "--help")]
    try:
        path, given = parse(words)
    except Wrong:
        if not any(map(PLACEHOLDER.match, words)):
            raise
        path, given = parse(["1" if PLACEHOLDER.match(word) else word for word in words])
    if found := SETTINGS.get(path):
        found(given, folder)


def check_name(text: str, folder: Path) -> None:
    """A command in prose: its name alone is enough, and where it has options the recipe may be left out."""
    words = next(simple_commands(text))[1:]
    command = penstock_command()
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    if rest == words:
        raise Wrong(f"{text}: there is no such command")
    if rest:
        try:
            check_penstock(words, folder)
        except Wrong:
            check_penstock([*words, "RECIPE"], folder)


def parse(words: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The command's path (``train export``) and its values. Raises `Wrong`."""
    command = penstock_command()
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    if path == ["slurm"] and words:  # `run` is meant
        path, command = ["slurm", "run"], command.commands["run"]
    try:
        context = command.make_context(path[-1] if path else "penstock", list(words))
    except Exception as error:  # typer's usage errors are classes of click, or of its own copy of it
        raise Wrong(f"penstock {' '.join([*path, *words])}: {getattr(error, 'message', error)}") from error
    if left := [*getattr(context, "_protected_args", ()), *context.args]:
        raise Wrong(f"penstock {' '.join(path)} has no command {left[0]!r}")
    if hasattr(command, "commands") and not getattr(command, "invoke_without_command", False):
        raise Wrong(f"penstock {' '.join(path)} needs a command: {', '.join(command.commands)}")
    return " ".join(path), context.params


def check_run(given: Mapping[str, Any], folder: Path) -> None:
    """The recipe with its overrides is a sound configuration, and what it names of the page's files is there."""
    path = given["recipe"] or ANY_RECIPE  # `doctor --join` takes the recipe from the queue
    config = load_config(_recipe(Path(path)), [one for one in given["overrides"] or () if "=" in one])
    for named in (config.agent.loop, config.agent.reward):
        if ".py:" in named and not (folder / named.partition(":")[0]).is_file():
            raise Wrong(f"{named}: the page shows no such file")
    find_loop(config.agent.loop, folder)
    theirs = [tool for tool in config.tools if "." in tool.name and not tool.name.startswith("penstock.")]
    make_tools(theirs, FakeSandbox(), partial(load_object, recipe_dir=folder))


def _recipe(path: Path) -> Path:
    """A recipe of the project must be there; any other name stands for the reader's own."""
    return path if path.parts[0] == "recipes" or path.is_file() else ANY_RECIPE


def check_sandbox(given: Mapping[str, Any], _folder: Path) -> None:
    recipe = given["recipe"]
    load_sandbox(None if recipe is None else _recipe(Path(recipe)), given["overrides"] or ())


def check_simulate(given: Mapping[str, Any], _folder: Path) -> None:
    overrides = list(given["overrides"] or ())
    if given["run"] is None:
        shipped = SETUP.with_name(Path(given["setup"]).name)
        changed(of_file(shipped if shipped.is_file() else ROOT / given["setup"]), overrides)
    else:  # what stands in the setup's place is the first change
        changed(of_file(SETUP), [str(given["setup"]), *overrides])


def check_bench(given: Mapping[str, Any], _folder: Path) -> None:
    for name in str(given["name"]).split(","):
        if name != "list" and not (ROOT / "benchmarks" / f"{name}.py").is_file():
            raise Wrong(f"penstock bench {name}: there is no such file in benchmarks/")


SETTINGS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "run": check_run,
    "doctor": check_run,
    "sandbox": check_sandbox,
    "simulate": check_simulate,
    "bench": check_bench,
}


def check_python(words: list[str], folder: Path) -> None:
    words = words[words[:1] == ["-P"] :]
    if words and words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise Wrong(f"python -m {words[1]}: there is no such module")
        if words[1].startswith("penstock.recipes."):
            check_file(words[1].removeprefix("penstock.").replace(".", "/") + ".py", words[2:])
    elif words and words[0].endswith(".py") and not (folder / words[0]).is_file():
        check_file(words[0], words[1:])


def check_file(name: str, words: Sequence[str]) -> None:
    """A script of the project is there, and its text has every option that it is given."""
    file = ROOT / name
    if not file.is_file():
        raise Wrong(f"{name}: there is no such file")
    text = file.read_text()
    for option in (word.strip("[]").partition("=")[0] for word in words if word.strip("[]").startswith("--")):
        if option not in text and "pytest" not in text:
            raise Wrong(f"{name} has no option {option}")


def check_pytest(words: list[str], _folder: Path) -> None:
    known = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and (unknown := set(re.findall(r"\w+", word)) - known - {"not", "and", "or"}):
            raise Wrong(f"pytest -m: no marker {', '.join(unknown)}")
        if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists():
            raise Wrong(f"pytest {word}: there is no such file")


def check_pip(words: list[str], _folder: Path) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for asked in re.findall(r"penstock\[([\w,-]+)\]|\.\[([\w,-]+)\]", " ".join(words)):
        for name in "".join(asked).split(","):
            if name not in extras:
                raise Wrong(f"pip install penstock[{name}]: the extras are {', '.join(extras)}")


CHECKS: Mapping[str, Callable[[list[str], Path], None]] = {
    "penstock": check_penstock,
    "python": check_python,
    "python3": check_python,
    "pytest": check_pytest,
    "pip": check_pip,
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a reader's: the checkout's recipes, and room for the page's files; the current directory."""
    for name in ("recipes", "simulator", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # recipes' folders join it
    return tmp_path


def simple_commands(text: str) -> Iterator[list[str]]:
    """Shell text as lists of words. Comments, redirections, leading assignments and here-documents are left out."""
    lines = iter(re.sub(r"\\\n\s*", " ", text).splitlines())
    for line in lines:
        yield from filter(None, map(_bare, _split(line)))
        for marker in re.findall(r"<<-?\s*['\"]?(\w+)", line):
            while next(lines, marker).strip() != marker:
                continue


def _split(line: str) -> Iterator[list[str]]:
    # A comment begins after a space; episodes have a `#` in their names.
    lexer = shlex.shlex(re.sub(r"(^|\s)#(\s.*)?$", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if token[0] in "<>":
            if words and words[-1].isdigit():
                words.pop()  # of `2>file`
            next(tokens, None)
        elif set(token) <= set(";&|()"):
            yield words
            words = []
        else:
            words.append(token)
    yield words


def _bare(words: list[str]) -> list[str]:
    while words and (words[0] in LEADING or ASSIGNMENT.match(words[0])):
        words = words[1:]
    return [] if words and (words[0] in CLOSING or words[0] == "for") else words
