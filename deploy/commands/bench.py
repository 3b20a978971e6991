"""`penstock bench`: figures with a ratio against a reference taken in the same minute."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Never

import typer

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def bench(
    name: Annotated[str, typer.Argument(help="One of the files in benchmarks/, without .py; `list` names them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure one part against a named reference, in the same minute.

    Runs `measure()` of benchmarks/NAME.py, which returns {bench, ratio, figures, setup}.
    """
    if name == "list":
        for file in _available():
            typer.echo(file)
        return
    if threading.current_thread() is threading.main_thread():  # others may not set what a signal does
        signal.signal(signal.SIGTERM, _leave)
    result = _load(name).measure()
    if as_json:
        typer.echo(json.dumps(result))
        return
    for part in ("setup", "figures", "ratio"):
        typer.echo(f"{part}:")
        for key, value in result[part].items():
            typer.echo(f"  {key}: {value}")


def _leave(number: int, _frame: FrameType | None) -> Never:
    """By an exception, as Ctrl-C does: what a benchmark started and wrote goes with its `finally` blocks."""
    raise SystemExit(128 + number)


def _available() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.py"))


def _load(name: str) -> ModuleType:
    if name not in _available():
        typer.secho(f"{name}: no such benchmark; there are: {', '.join(_available()) or 'none'}", fg="red", err=True)
        raise typer.Exit(2)
    spec = importlib.util.spec_from_file_location(f"penstock_bench_{name}", FOLDER / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{FOLDER / name}.py cannot be loaded")
    if str(FOLDER.parent) not in sys.path:
        sys.path.append(str(FOLDER.parent))  # for benchmarks.support, which several benchmarks share
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being made
    spec.loader.exec_module(module)
    return module
