"""docs/reference/cli.md: every command with its help, arguments and options, read off the typer app."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from scripts.reference.markdown import cell, code

from penstock.deploy.cli import app

HEADER = """# Command line

In a terminal: `penstock --help`.
`KEY=VALUE` overrides keys of the [configuration](configuration.md).
"""
EXAMPLE = re.compile(r"^Examples?:\s*")
KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", bool: ""}
"""By annotation: typer's own names of types change with its versions, and this page would with them."""


def render() -> str:
    root = typer.main.get_command(app)
    lines = [HEADER, *_index(root), ""]
    for path, command in _commands(root, "penstock"):
        lines += _section(path, command)
    return "\n".join(lines).rstrip() + "\n"


def _index(root: Any) -> Iterator[str]:
    yield "| command | |\n| --- | --- |"
    for path, command in _commands(root, "penstock"):
        yield f"| [`{path}`](#{path.replace(' ', '-')}) | {_first_sentence(_help(command))} |"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Depth first, by name; groups that do nothing by themselves are passed over."""
    children = getattr(command, "commands", {})
    if not children or getattr(command, "invoke_without_command", False):
        yield path, command
    for name, child in sorted(children.items()):
        if not child.hidden:
            yield from _commands(child, f"{path} {name}")


def _section(path: str, command: Any) -> Iterator[str]:
    shown = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)])
    yield f"## {path}\n"
    yield f"`{usage}`\n"
    yield from _prose(_help(command))
    hints = get_type_hints(inspect.unwrap(command.callback))
    rows = [(code(_usage(one)), one) for one in arguments] + [(_flags(one, hints), one) for one in options]
    if rows:
        yield "| | default | |\n| --- | --- | --- |"
        yield from (f"| {name} | {_default(one)} | {cell(one.help or '')} |" for name, one in rows)
        yield ""


def _help(command: Any) -> str:
    return (command.help or "").strip()


def _first_sentence(text: str) -> str:
    return cell(re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0])


def _prose(text: str) -> Iterator[str]:
    """Paragraphs; those that begin with "Example" become commands, one per line."""
    for paragraph in re.split(r"\n\s*\n(?!penstock )", text):
        if EXAMPLE.match(paragraph):
            commands = re.split(r"\s+·\s+|\n\s*", EXAMPLE.sub("", paragraph))
            yield "\n".join(["```bash", *(line.strip() for line in commands), "```", ""])
        elif paragraph:
            yield paragraph + "\n"


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if argument.metavar is None and argument.nargs == -1:
        name += "…"
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _flags(option: Any, hints: Mapping[str, Any]) -> str:
    """Its names, and what it takes."""
    names = [*option.opts, *option.secondary_opts, *filter(None, [_kind(hints[option.name])])]
    return " ".join(map(code, names))


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if hint in KINDS:
        return KINDS[hint]
    return next((_kind(one) for one in get_args(hint) if one is not NoneType), "TEXT")


def _default(option: Any) -> str:
    if option.required:
        return "*needed*"
    if option.default is None or option.default is False or callable(option.default):
        return ""
    return code(str(option.default))
