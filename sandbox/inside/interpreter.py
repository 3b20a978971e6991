"""The interpreter of a session: code arrives over one pipe, outcomes leave over another, names persist.

The code shares this process, so it can forge its own outcome, and nothing else: the driver takes no more from here
than "run N ended with exit code C".
"""

from __future__ import annotations

import builtins
import os
import struct
import sys
import types
from typing import Any

REQUEST = struct.Struct(">II")
"""run number, bytes of code that follow"""
OUTCOME_BYTES = 20
PYCF_ONLY_AST = 0x400
PACKAGES = (
    "/usr/local/lib/python{0}.{1}/dist-packages",
    "/usr/lib/python3/dist-packages",
    sys.prefix + "/lib/python{0}.{1}/site-packages",
)


def serve(requests: int, outcomes: int) -> int:
    """Body of the interpreter's process: until the driver closes the pipe."""
    namespace = _fresh_main()
    sources: dict[str, str] = {}
    while header := _read_exactly(requests, REQUEST.size):
        number, size = REQUEST.unpack(header)
        name = f"<call {len(sources) + 1}>"
        sources[name] = _read_exactly(requests, size).decode("utf-8")
        exit_code = execute(sources[name], name, namespace, sources)
        _flush()
        # The code may have closed the pipe, or made reading it fail while it is empty. After the outcome was reported,
        # that would end this process during the next call; here it ends this call.
        os.set_blocking(requests, True)
        # Digits, so that a shell can write it too.
        os.write(outcomes, b"%010d%010d" % (number, exit_code))
    return 0


def execute(code: str, name: str, namespace: dict[str, Any], sources: dict[str, str]) -> int:
    """Run `code`, showing a last expression as notebooks do. Returns 0, 1 after an exception, or sys.exit's code."""
    try:
        body, last = _split_last_expression(code, name)
        exec(body, namespace)  # noqa: S102 - this is the box's purpose
        if last is not None:
            exec(last, namespace)  # noqa: S102
    except SystemExit as error:
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever the code raised is its result
        _show(error, sources)
        return 1
    return 0


def _split_last_expression(code: str, name: str) -> tuple[Any, Any]:
    tree: Any = compile(code, name, "exec", PYCF_ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and type(tree.body[-1]).__name__ == "Expr":
        import _ast

        last = compile(_ast.Interactive([tree.body.pop()]), name, "single", dont_inherit=True)
    return compile(tree, name, "exec", dont_inherit=True), last


def _show(error: BaseException, sources: dict[str, str]) -> None:
    """The traceback from the code's own first frame on; falls back to less where the code broke the means."""
    try:
        import linecache
        import traceback

        for name, source in sources.items():
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        while frames and frames.tb_frame.f_code.co_filename not in sources:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames, limit=-20))
    except BaseException:  # noqa: BLE001 - out of memory or recursion while formatting
        text = f"{type(error).__name__}\n"
    os.write(2, text.encode("utf-8", "replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001, S112 - the code may have replaced or closed it
            continue


def _fresh_main() -> dict[str, Any]:
    """An empty ``__main__`` with what `site` would have added: exit, quit and the system's packages."""
    sys.path += [path for path in (p.format(*sys.version_info) for p in PACKAGES) if os.path.isdir(path)]
    sys.argv = [""]
    # new ones: those of the driver were opened on what its descriptors were then
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return data
