"""Patches of graded episodes as SWE-bench's predictions: what its own harness, and its leaderboard, take.

    swe or harbor tools, setting `predictions` ─► FOLDER/EPISODE.json, one per episode ─► `export` ─► predictions.jsonl

A line is {"instance_id", "model_name_or_path", "model_patch"}. A file holds one prediction of an instance: of several
samples of a task, `sample` says which one, in the order of their episodes' names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.common import rewrite_jsonl
from penstock.datasets.swe.rows import BadFile, Fields

KEYS = ("instance_id", "model_patch")


def export_predictions(folder: Path, out: Path, model: str, sample: int = 0) -> tuple[int, list[str]]:
    """(how many were written, instances that have no such sample). Raises `BadFile`."""
    by_instance: dict[str, list[Fields]] = {}
    for fields in _recorded(folder):
        by_instance.setdefault(str(fields["instance_id"]), []).append(fields)
    chosen = {name: samples[sample] for name, samples in by_instance.items() if sample < len(samples)}
    if not chosen:
        last = max(map(len, by_instance.values())) - 1
        raise BadFile(f"{folder}: no instance has a sample {sample}; they have 0{f' to {last}' if last else ''}")
    out.parent.mkdir(parents=True, exist_ok=True)
    rewrite_jsonl(
        out,
        [
            {"instance_id": name, "model_name_or_path": model, "model_patch": fields["model_patch"]}
            for name, fields in sorted(chosen.items())
        ],
    )
    return len(chosen), sorted(set(by_instance) - set(chosen))


def _recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield recorded episodes by name. Raises `BadFile`."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise BadFile(
            f"{folder}: no predictions; the tools `swe` and `harbor` write them with settings: {{predictions: FOLDER}},"
            " `harbor` of tasks alone whose working directory is a git repository"
        )
    for file in files:
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadFile(f"{file}: not readable: {error}") from error
        if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in KEYS):
            raise BadFile(f"{file}: it must have the texts {', '.join(KEYS)}")
        yield fields
