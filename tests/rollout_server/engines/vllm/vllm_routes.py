"""Reads the routes that we call out of vLLM's source, without importing it.

cd tests/rollout_server/engines/vllm && python vllm_routes.py SITE_PACKAGES > vllm_routes.json
"""

from __future__ import annotations

import ast
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.rollout_server.engines.vllm.engine import VLLMEngine

ROUTES = {*VLLMEngine.routes, *VLLMEngine.sleep_routes, *VLLMEngine.adapter_routes}
CONSTANTS = {"PauseMode": "v1/engine/__init__.py", "SLEEP_TAGS": "v1/executor/abstract.py"}


def read_routes(site_packages: Path) -> dict[str, Any]:
    """ "METHOD PATH" → name of each of its parameters; and the expressions of `CONSTANTS`."""
    root = site_packages / "vllm"
    found: dict[str, Any] = {}
    for file in sorted((root / "entrypoints").rglob("*.py")):
        text = file.read_text()
        if "router." in text:
            found |= dict(_routes(_parsed(text)))
    for name, place in CONSTANTS.items():
        found[name] = next(_values(_parsed((root / place).read_text()), name), None)
    return dict(sorted(found.items()))


def _parsed(text: str) -> ast.Module:
    """Parses without collecting garbage: `ast` of CPython 3.11 fails if a finalizer uses it meanwhile (gh-106905)."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def _routes(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for route in map(_route, node.decorator_list):
                if route.partition(" ")[2] in ROUTES:
                    yield route, _parameters(node)


def _route(decorator: ast.expr) -> str:
    """Empty where it is none."""
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.args):
        return ""
    path = decorator.args[0]
    if not (isinstance(path, ast.Constant) and ast.unparse(decorator.func.value) == "router"):
        return ""
    return f"{decorator.func.attr.upper()} {path.value}"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Those of the signature, and those that are read out of the request by name."""
    named = [one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "raw_request"]
    read = [
        node.args[0].value
        for line in function.body
        for node in ast.walk(line)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "getlist")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    return sorted({*named, *map(str, read)})


def _values(tree: ast.Module, name: str) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and node.value:  # type: ignore[attr-defined]
            yield ast.unparse(node.value)  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(json.dumps(read_routes(Path(sys.argv[1])), indent=1))
