"""What a person asks of Slurm, as the command line has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.deploy.load_config import ConfigError

Runtime = Literal["pyxis", "apptainer"]


@dataclass(frozen=True, slots=True)
class Job:
    """One Slurm job. Checked when made; raises `ConfigError` naming the option."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """As Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS; None: the partition's own limit."""
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    """0: all of each node (`--exclusive`)."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, without their dashes: ``qos=high``."""
    setup: Sequence[str] = ()
    """Lines of shell that run first, on the job's first node."""
    container: str | None = None
    runtime: Runtime = "pyxis"
    mounts: Sequence[Path] = ()
    """Folders that containers see besides those of the recipe."""

    def __post_init__(self) -> None:
        for option in self.sbatch:
            if not option or option.startswith("-") or "\n" in option:
                raise ConfigError(f"--sbatch {option!r}: write it without dashes, for example --sbatch qos=high")
        for line in self.setup:
            if "\n" in line:
                raise ConfigError("--setup: one line each; give it several times")
        for folder in self.mounts:
            if not folder.is_absolute() or "," in str(folder) or ":" in str(folder):
                raise ConfigError(f"--mount {folder}: an absolute path without commas and colons")

    def directives(self) -> list[str]:
        """Lines after ``#SBATCH --`` that every job has."""
        named = (("partition", self.partition), ("account", self.account), ("time", self.time))
        lines = [f"{name}={value}" for name, value in named if value]
        lines += ["ntasks-per-node=1", f"cpus-per-task={self.cpus_per_node}" if self.cpus_per_node else "exclusive"]
        lines += [f"gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        return [*lines, *self.sbatch]
