"""The builds of torch in this machine's environments, and the NVIDIA driver that they need.

    python3 deploy/preflight/torch_builds.py [PYTHON ...]

prints the driver and, for each environment's interpreter, its torch; without arguments the CUDA of the wheels that
scripts/setup installs is asked for. The exit status is 1 where the driver is too old. The standard library alone is
used, so that this can be asked before anything is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

ASK_S = 60.0
"""A driver that was not used since the machine started is slow."""
PROBE = """
import importlib.metadata as metadata, importlib.util, json, pathlib, runpy
spec = importlib.util.find_spec("torch")
torch = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py"))) if spec else {}
names = [name for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if list(metadata.distributions(name=name))]
nccl = metadata.version(names[0]) if names else ""
print(json.dumps([torch.get("__version__", ""), torch.get("cuda") or "", nccl]))
"""
"""torch itself is not imported: that takes seconds."""


class TorchBuild(NamedTuple):
    """The torch of one environment; its fields are empty if it has none."""

    torch: str
    cuda: str
    """``13.0``; empty in a build for CPUs."""
    nccl: str

    @property
    def driver(self) -> int:
        """First branch of the driver that will do; 0 where none is needed, or it is not known."""
        # Major version of CUDA → first branch of the driver for it (NVIDIA, "CUDA Compatibility", minor version
        # compatibility).
        return {12: 525, 13: 580}.get(int(self.cuda.partition(".")[0]), 0) if self.cuda else 0

    def __str__(self) -> str:
        """``torch 2.13.0 (CUDA 13.0, NCCL 2.29.7)``"""
        name = f"torch {self.torch}" if self.torch else "no torch"
        return f"{name} (CUDA {self.cuda}, NCCL {self.nccl or 'unknown'})" if self.cuda else name


def build_of(python: str) -> TorchBuild:
    """Raises `OSError`, `subprocess.SubprocessError` for an interpreter that cannot be run."""
    done = subprocess.run([python, "-I", "-c", PROBE], capture_output=True, text=True, timeout=ASK_S, check=True)
    return TorchBuild(*json.loads(done.stdout))


def driver_version() -> str:
    """Return the driver's version, such as ``580.65.06``. Raises `OSError`, `subprocess.SubprocessError`."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    return done.stdout.strip().partition("\n")[0]


def newer_driver(driver: str, builds: Iterable[TorchBuild]) -> str:
    """Return the driver to install if `driver` is too old for one of the builds, else an empty text."""
    needed = max(builds, key=lambda build: build.driver, default=None)
    branch = driver.partition(".")[0]
    if needed is None or not branch.isdecimal() or int(branch) >= needed.driver:
        return ""
    return f"install NVIDIA's driver {needed.driver} or newer: torch {needed.torch} needs it for CUDA {needed.cuda}"


def main(pythons: list[str]) -> int:
    try:
        driver, builds = driver_version(), {python: build_of(python) for python in pythons}
    except (OSError, subprocess.SubprocessError) as error:
        print(f"driver or environment cannot be asked: {error}", file=sys.stderr)
        return 1
    print(f"driver {driver}")
    for python, build in builds.items():
        print(f"{python}: {build}")
    fix = newer_driver(driver, list(builds.values()) or [TorchBuild("as scripts/setup installs it", "13.0", "")])
    if fix:
        print(f"driver {driver} is too old: {fix}", file=sys.stderr)
    return 1 if fix else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
