"""The driver's modules as one blob of byte code, compiled by the interpreter that will run them in the box.

Compiling them anew in every box would cost about as much CPU as everything else in its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.sandbox.protocol import SandboxError

MODULES = ("capture", "children", "interpreter", "shell", "persistent", "memory", "forward", "calls", "driver")
"""Modules in import order: each finds the earlier ones in `sys.modules`."""
ZYGOTE_MODULES = (*MODULES, "zygote")
KEEPER_MODULES = (*MODULES, "relay", "keeper")
PACKAGE = "penstock.sandbox.inside"

_COMPILE = """
import sys, json, marshal
sources = json.load(sys.stdin)
sys.stdout.buffer.write(marshal.dumps([(name, compile(text, "<" + name + ">", "exec")) for name, text in sources]))
"""

_FROM_FILE = """
import sys, os, marshal, types
with os.fdopen(int(sys.argv[2]), "rb") as blob:
    modules = marshal.load(blob)
"""

_FROM_STDIN = """
import sys, os, json, types
assert sys.version_info >= (3, 9), "Python 3.9 or newer is needed, this is " + sys.version
text = b""
while not text.endswith(b"\\n"):
    chunk = os.read(0, 65536)
    if not chunk:
        sys.exit("cut off")
    text += chunk
modules = [(name, compile(text, "<" + name + ">", "exec")) for name, text in json.loads(text)]
"""

_BOOT = """
package = sys.modules["{package}"] = types.ModuleType("{package}")
for name, code in modules:
    module = sys.modules["{package}." + name] = types.ModuleType("{package}." + name)
    setattr(package, name, module)
    exec(code, module.__dict__)
module.main()
""".replace("{package}", PACKAGE)


def compile_driver(python: str, modules: tuple[str, ...] = MODULES) -> bytes:
    """The last of `modules` has the `main` that is run. Raises `SandboxError` where `python` cannot be run."""
    try:
        command = [python, "-I", "-S", "-c", _COMPILE]
        done = subprocess.run(command, input=_sources(modules), capture_output=True, timeout=30, check=False)
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
    """Argument vector of the driver, or of the zygote where the blob is of `ZYGOTE_MODULES`.

    Descriptor 0 must be the driver's control socket, `blob_fd` one of `open_blobs`.
    """
    return [python, "-I", "-S", "-c", _FROM_FILE + _BOOT, json.dumps(settings), blob_fd]


def command_from_stdin(python: str, settings: dict[str, object]) -> list[str]:
    """The same for another machine's interpreter: it reads `line_of` some modules from its stdin first."""
    return [python, "-I", "-S", "-c", _FROM_STDIN + _BOOT, json.dumps(settings)]


def line_of(modules: tuple[str, ...] = MODULES) -> bytes:
    """The modules as one line of ASCII text, for connections that may carry text alone."""
    return _sources(modules) + b"\n"


def _sources(modules: tuple[str, ...]) -> bytes:
    folder = Path(__file__).parent / "inside"
    return json.dumps([(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]).encode()


@contextlib.contextmanager
def open_blobs(contents: Iterable[bytes]) -> Iterator[list[int]]:
    """Descriptors of files in memory that a started process reads from their beginning."""
    blobs: list[int] = []
    try:
        for content in contents:
            blobs.append(os.memfd_create("penstock", os.MFD_CLOEXEC))
            os.write(blobs[-1], content)
            os.lseek(blobs[-1], 0, os.SEEK_SET)
        yield blobs
    finally:
        for blob in blobs:
            os.close(blob)
