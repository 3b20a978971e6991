"""A desk in Slurm's place: programs of Slurm's names that note what a script asks for and do what the test says."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SRUN = r"""#!/bin/bash
for word in "$@"; do case $word in --job-name=*) name=${word#*=} ;; esac; done
name=${name:-cleaning}
{ printf '%s\n' "$@"; } >"$DESK/asked/.$name.$$" && mv "$DESK/asked/.$name.$$" "$DESK/asked/$name.$$"
[ "$name" != cleaning ] || exit 0
if [ "$name" = address ]; then while [[ $1 == --* ]]; do shift; done; exec "$@"; fi
if mv "$DESK/dies/$name" "$DESK/died/$name" 2>/dev/null; then exit "$(cat "$DESK/died/$name")"; fi
over=$DESK/stopped
[ "$name" != head ] || over=$DESK/head-over
while [ ! -s "$over" ]; do sleep 0.05; done
exit "$(cat "$over")"
"""
SCONTROL = r"""#!/bin/bash
case "$1 $2" in
  "show hostnames") tr ' ' '\n' <"$DESK/nodes" ;;
  "show node") echo "NodeName=$3 Arch=x86_64 NodeAddr=${NODE_ADDRESS:-127.0.0.1} NodeHostName=vm" ;;
  *) echo "scontrol $*" >>"$DESK/orders" ;;
esac
"""
SQUEUE = r"""#!/bin/bash
case " $* " in
  *" --steps "*) printf '7.0 head\n77.extern extern\n77.3 head\n77.4 rollout-0\n' ;;
  *) cat "$DESK/state" ;;
esac
"""
SCANCEL = r"""#!/bin/bash
echo "scancel $*" >>"$DESK/orders"
case "${*: -1}" in 77.3) echo 130 >"$DESK/head-over" ;; *) echo 0 >"$DESK/stopped" ;; esac
"""


class Desk:
    """`start` a script as job 77 on these nodes; the head and the roles live until they are told."""

    def __init__(self, folder: Path, nodes: str = "n1 n2") -> None:
        self.folder = folder
        for name in ("bin", "asked", "dies", "died"):
            (folder / name).mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", SCANCEL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "nodes").write_text(f"{nodes}\n")
        self.says("RUNNING")

    def says(self, state: str) -> None:
        """What squeue answers from now on."""
        (self.folder / "state").write_text(f"{state}\n")

    def kill_next(self, name: str, status: int) -> None:
        """The next step of that name ends at once."""
        (self.folder / "dies" / name).write_text(str(status))

    def end_head(self, status: int) -> None:
        (self.folder / "head-over").write_text(str(status))

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        path = self.folder / "script"
        path.write_text(script)
        environment = {
            **os.environ,
            "DESK": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-9]",
            "SLURM_CPUS_ON_NODE": "16",
            **variables,
        }
        return subprocess.Popen(
            ["bash", str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def play(self, script: str, steps: set[str]) -> tuple[str, dict[str, str]]:
        """Starts a script, lets the head succeed once exactly these steps run; (output, step → first srun's words)."""
        job = self.start(script)
        self.wait_for(lambda: set(self.asked()) == steps)
        self.end_head(0)
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 0, output
        return output, {name: " ".join(calls[0]) for name, calls in self.asked().items() if name != "cleaning"}

    def asked(self) -> dict[str, list[list[str]]]:
        """Step → the words of each srun for it, in order."""
        found: dict[str, list[list[str]]] = {}
        for path in sorted((self.folder / "asked").glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns):
            found.setdefault(path.name.rpartition(".")[0], []).append(path.read_text().splitlines())
        return found

    def orders(self) -> list[str]:
        path = self.folder / "orders"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"asked {sorted(self.asked())}, orders {self.orders()}"
            time.sleep(0.05)
