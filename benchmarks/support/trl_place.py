"""Where `scripts/setup-trl` has put TRL, and how a process gets to see it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.support.child import ROOT

FOLDER = ROOT / ".venv-trl"


def trl_version(folder: str) -> str | None:
    """Of the TRL that `scripts/setup-trl` has put there; None without one."""
    file = Path(folder) / "complete"
    packages = file.read_text().split() if folder and file.exists() else []
    return next((one for one in packages if one.startswith("trl==")), None)


def trl_environment(folder: str) -> dict[str, str]:
    """torch, transformers and all that this environment has are those of the other sides. The repository's `datasets`
    comes after the package of that name, and the current folder not at all."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), folder, str(ROOT)]), "PYTHONSAFEPATH": "1"}
