"""Weights & Biases: the numbers of each version, and texts only where `trainer.wandb.samples` asks for them.

The key and everything about the server come from W&B's own variables (`WANDB_API_KEY`, `WANDB_MODE=offline`,
`WANDB_ENTITY`, `WANDB_BASE_URL`). A run that is resumed continues under the same id, kept in ``wandb_id``.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.trainer.sinks import SINKS, MetricSink, Record, SinkJob, numbers, plain_text

VERSION = "version"
"""The axis of every curve: evaluations come late, and W&B's own step may never go back."""
START_TIMEOUT_S = 60.0


class WandbRun:
    """`run` is what ``library.init`` gave, `library` W&B itself."""

    def __init__(self, run: Any, samples: int, library: Any) -> None:
        self._run = run
        self._samples = samples
        self._library = library
        self._texts: dict[str, Any] = {}
        """Sent with the step's numbers: its own call would be its own row."""

    def rewind(self, step: int) -> None:
        """Rewind: what was sent stays; replayed versions are sent again, and the newest value of a version counts."""

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**numbers(metrics), VERSION: version, **self._texts})
        self._texts = {}

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, VERSION: version})

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        rows = [[one["episode_id"], one["reward"], plain_text(one)] for one in records[: self._samples]]
        if rows:
            self._texts = {"episodes": self._library.Table(columns=["episode", "reward", "text"], data=rows)}

    def close(self) -> None:
        self._run.finish()
        # W&B's own process writes and sends on: this waits for it.
        self._library.teardown()


@SINKS.register("wandb")
def wandb(job: SinkJob) -> MetricSink:
    """Raises `ImportError` without the extra, `LookupError` without a key, and what W&B raises of itself."""
    import wandb as library

    if os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun") and not os.environ.get("WANDB_API_KEY"):
        # W&B would prompt on the terminal, and wait.
        raise LookupError("WANDB_API_KEY is not set; WANDB_MODE=offline needs none")
    chosen = job.settings.get("trainer", {}).get("wandb", {})
    run = library.init(
        project=chosen.get("project") or "penstock",
        group=chosen.get("group") or None,
        name=job.name,
        id=resume_id(job.run_dir),
        resume="allow",
        dir=str(job.run_dir),
        config=without_secrets(job.settings),
        settings=library.Settings(
            init_timeout=START_TIMEOUT_S, console="off", save_code=False, disable_git=True, silent=True
        ),
    )
    run.define_metric("*", step_metric=VERSION)
    return WandbRun(run, int(chosen.get("samples") or 0), library)


def resume_id(run_dir: Path) -> str:
    """This run's id at W&B, the same for every life of its trainer."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(f"{secrets.token_hex(8)}\n")
    return path.read_text().strip()


def without_secrets(settings: Any) -> Any:
    """Plain data without the values of keys that may hold a secret, addresses with logins in them among these."""
    if isinstance(settings, Mapping):
        secret = re.compile(r"key|token|secret|password|credential|url", re.IGNORECASE)
        return {
            key: without_secrets(value)
            for key, value in settings.items()
            if not (isinstance(value, str) and secret.search(str(key)))
        }
    return [without_secrets(item) for item in settings] if isinstance(settings, list | tuple) else settings
