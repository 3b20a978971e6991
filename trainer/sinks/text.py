"""A recorded trajectory as plain text, for places that show text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.trainer.sinks import Record


def plain_text(record: Record) -> str:
    """Prompt and runs as they were fed and sampled, each under a line that says which; ids where there is no text."""
    head = f"{record['episode_id']}  reward {record['reward']}  {record['outcome']['kind']}"
    parts = [head]
    for segment in record["segments"]:
        parts += ["── prompt", _text(segment["prompt"])]
        for run in segment["runs"]:
            parts += [f"── {_title(run)}", _text(run["text"])]
    return "\n".join(parts)


def _title(run: Mapping[str, Any]) -> str:
    if not run["mask"]:
        return "fed"
    versions = ", ".join(str(version) for version, _ in run.get("versions", ()))
    return f"sampled, version {versions}" if versions else "sampled"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))
