"""A script into the run's folder and into Slurm's queue."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from penstock.deploy.load_config import ConfigError
from penstock.deploy.placements.slurm.secrets import SECRET_VARIABLES, write_private

SBATCH_TIMEOUT_S = 60.0


def submit(script: str, path: Path) -> str:
    """Write `script` to `path` and submit it; the job's id. Raises `ConfigError` with what sbatch says."""
    write_private(path, script)
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            env=environment,  # Slurm keeps what it is given until the job ends
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"no sbatch on this machine; {path} is written, submit it where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch {path} did not answer for {SBATCH_TIMEOUT_S:.0f} s; is slurmctld up? (scontrol ping)"
        ) from None
    if done.returncode:
        raise ConfigError(f"sbatch {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
