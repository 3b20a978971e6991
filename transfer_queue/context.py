"""What every role of a run gets, whatever it does with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.transfer_queue.queue import TransferQueue


@dataclass(frozen=True, slots=True)
class RunContext:
    """Shared by the jobs of agent worker, rollout server, gateway and trainer."""

    queue: TransferQueue
    """Connected; the caller closes it."""
    model: str
    """Folder or hub name of the tokenizer and of the weights of version 0."""
    token: str = field(default="", repr=False)
    """The run's token, asked of everyone who calls one of its servers."""
    name: str = ""
    """The run's name."""
    seed: int = 0
    """Seed of everything that a role draws at random."""
    recipe_dir: Path = Path()
    """Files named in the recipe are searched here first."""
    lease_ttl_s: float = 15.0
    """A lease that is not renewed for this long is lost."""
