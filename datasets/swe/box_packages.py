"""pytest and what it needs, as a folder of plain Python files that goes into boxes whose own Python has none."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

NEEDED = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEXERS = ("__init__.py", "_mapping.py", "python.py", "diff.py")
_BOX_PYTHON = Path("/usr/bin/python3")
COMPILE_DEADLINE_S = 120


class NoPytest(RuntimeError):
    """This environment has no pytest to copy."""


def write_box_packages(folder: Path) -> Path:
    """Copy this environment's pytest into `folder`. Raises `NoPytest`.

    Byte code is made for the machine's own Python, which boxes of backend ``bwrap`` run; another one does without.
    """
    for name in NEEDED:
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError as error:
            raise NoPytest(f"{name} is not installed here; pip install pytest") from error
        for file in files:
            if ".." not in file.parts and _is_needed(file.parts):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), folder / file)
    if _BOX_PYTHON.exists():
        command = [str(_BOX_PYTHON), "-m", "compileall", "-q", str(folder)]
        subprocess.run(command, check=True, timeout=COMPILE_DEADLINE_S)
    return folder


def _is_needed(parts: tuple[str, ...]) -> bool:
    """Code, and the versions that pytest's header asks for; of pygments' hundreds of lexers pytest asks for three."""
    if parts[-1] != "METADATA" and not parts[-1].endswith(".py"):
        return False
    return parts[:2] != ("pygments", "lexers") or parts[2] in _LEXERS
