"""docs/reference/python.md: what users write against, read off the source without importing it (no torch needed)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.reference.markdown import cell, code
from scripts.reference.public import PUBLIC

HEADER = """# Python

The names that users write against, with their docstrings.
CHANGELOG.md says when one of these names changes; anything else may change without a word.
"""
ROOT = Path(__file__).resolve().parents[2]
"""Holds the folder of each part (agent_loops, tools …), as a checkout and as an installed package have it."""
SECTION = re.compile(r"^(Args|Raises|Returns|Yields):$")
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.ClassDef, *FUNCTIONS)


def render() -> str:
    lines = [HEADER]
    for title, names in PUBLIC.items():
        lines.append(f"## {title}\n")
        for dotted in names:
            lines += _entry(dotted)
    return "\n".join(lines).rstrip() + "\n"


def _entry(dotted: str) -> Iterator[str]:
    module, _, name = dotted.rpartition(".")
    found = find(module, name)
    yield f"### {name}\n"
    yield f"```python\nfrom {module} import {name}\n```\n"
    if isinstance(found, ast.ClassDef):
        yield from _class(found)
    else:
        yield from _function(found)


def find(module: str, name: str) -> Documented:
    """The definition of `name`, which `module` defines or imports. Raises `LookupError`."""
    for node in _tree(module).body:
        if isinstance(node, DEFINITIONS) and node.name == name and not _is_overload(node):
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return find(f"{module}.{node.module}" if node.level else node.module, name)
    raise LookupError(f"{module} has no {name}: fix scripts/reference/public.py")


@cache
def _tree(module: str) -> ast.Module:
    """Of a folder its face: ``__init__.pyi`` where names are imported lazily."""
    file = ROOT.joinpath(*module.split(".")[1:])
    choices = (file / "__init__.pyi", file / "__init__.py", file.with_suffix(".py"))
    return ast.parse(next(choice for choice in choices if choice.is_file()).read_text(encoding="utf-8"))


def _is_overload(node: Documented) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"`class {node.name}({bases})`\n" if bases else f"`class {node.name}`\n"
    yield from _docstring(node)
    fields = list(_fields(node))
    if fields:
        yield "| field | |\n| --- | --- |"
        yield from fields
        yield ""
    for method in node.body:
        if isinstance(method, FUNCTIONS) and _is_public(method):
            yield from _function(method)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Annotated names of the class body, each with the string below it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or ast.unparse(item.target).startswith("_"):
            continue
        docstring = after.value if isinstance(after, ast.Expr) else None
        text = docstring.value if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str) else ""
        yield f"| {code(f'{ast.unparse(item.target)}: {ast.unparse(item.annotation)}')} | {cell(text)} |"


def _is_public(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    docstring = ast.get_docstring(method) is not None
    return not _is_overload(method) and (docstring if method.name == "__init__" else not method.name.startswith("_"))


def _function(node: Documented) -> Iterator[str]:
    assert isinstance(node, FUNCTIONS)
    yield f"`{_signature(node)}`\n"
    yield from _docstring(node)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    returns = ast.unparse(node.returns) if node.returns is not None else "None"
    if "property" in decorators:
        return f"{node.name}: {returns}"
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    words = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    words += ["classmethod"] if "classmethod" in decorators else []
    return " ".join([*words, f"{node.name}({arguments})", *([] if returns == "None" else ["->", returns])])


def _docstring(node: Documented) -> Iterator[str]:
    """Paragraphs as they are; the lines of "Args:" and the like as a list."""
    text = (ast.get_docstring(node) or "").replace("``", "`")
    section = False
    for line in text.splitlines():
        if SECTION.match(line):
            section = True
            yield f"{line}\n"
        elif section and line.startswith("    ") and not line.startswith("     "):
            yield f"- {line.strip()}"
        elif section and line.startswith("     "):
            yield f"  {line.strip()}"
        else:
            section = section and not line
            yield line
    yield ""
