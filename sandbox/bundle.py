"""The driver's modules as one blob of byte code, compiled by the interpreter that will run them in the box.

Compiling them anew in every box would cost about as much CPU as everything else in its start.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from penstock.sandbox.protocol import SandboxError

MODULES = (
    *("frames", "capture", "children", "processes", "interpreter", "shell", "residents", "watch"),
    *("files", "calls", "driver"),
)
"""In import order: each finds those before it in `sys.modules`."""
PACKAGE = "penstock.sandbox.inside"

_COMPILE = """
import sys, json, marshal
sources = json.load(sys.stdin)
sys.stdout.buffer.write(marshal.dumps([(name, compile(text, "<" + name + ">", "exec")) for name, text in sources]))
"""

_BOOT = """
import sys, os, marshal, types
with os.fdopen(int(sys.argv[2]), "rb") as blob:
    modules = marshal.load(blob)
package = sys.modules["{package}"] = types.ModuleType("{package}")
for name, code in modules:
    module = sys.modules["{package}." + name] = types.ModuleType("{package}." + name)
    setattr(package, name, module)
    exec(code, module.__dict__)
module.main()
""".replace("{package}", PACKAGE)


def compile_driver(python: str) -> bytes:
    """Raises `SandboxError` where `python` cannot be run."""
    folder = Path(__file__).parent / "inside"
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    try:
        command, text = [python, "-I", "-S", "-c", _COMPILE], json.dumps(sources).encode()
        done = subprocess.run(command, input=text, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(
            f"the boxes' interpreter {python} cannot be run: {error} (`apt-get install python3`)"
        ) from error
    if done.returncode != 0:
        raise SandboxError(
            f"{python} cannot compile the driver (3.9 or newer is needed): {done.stderr.decode()[-500:]}"
        )
    return done.stdout


def driver_command(python: str, settings: dict[str, object], blob_fd: str) -> list[str]:
    """Argument vector of the driver; descriptor 0 must be its control socket, `blob_fd` a fresh `open_blob`."""
    return [python, "-I", "-S", "-c", _BOOT, json.dumps(settings), blob_fd]


def open_blob(content: bytes) -> int:
    """A file in memory that a started process reads from its beginning; the caller closes it."""
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
