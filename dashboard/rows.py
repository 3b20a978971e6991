"""What the index keeps of one recorded trajectory: the columns that the list shows, and the text that is searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

COLUMNS = {
    "step": "INTEGER",
    "episode": "TEXT",
    "task": "TEXT",
    "reward": "REAL",
    "advantage": "REAL",
    "outcome": "TEXT",
    "reason": "TEXT",
    "turns": "INTEGER",
    "tokens": "INTEGER",
    "sampled": "INTEGER",
    "oldest": "INTEGER",
    "newest": "INTEGER",
    "tool_calls": "INTEGER",
    "source": "TEXT",
    "agent": "TEXT",
    "latency_s": "REAL",
    "snippet": "TEXT",
}
SNIPPET = 160


def columns_of(record: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Values by the names of `COLUMNS`. Raises `KeyError` for a line that is no trajectory."""
    episode = str(record["episode_id"])
    runs = [run for segment in record["segments"] for run in segment["runs"]]
    versions = [version for run in runs for version, _ in run.get("versions", ())]
    outcome, extra, metrics = record.get("outcome", {}), record.get("extra", {}), record.get("metrics", {})
    return {
        "step": step,
        "episode": episode,
        "task": episode.rpartition("#")[0],
        "reward": record.get("reward"),
        "advantage": record.get("advantage"),
        "outcome": outcome.get("kind", ""),
        "reason": " ".join(filter(None, (outcome.get("component"), outcome.get("reason")))),
        "turns": record.get("num_turns", 0),
        "tokens": sum(run["tokens"] for run in runs),
        "sampled": sum(run["tokens"] for run in runs if run["mask"]),
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "tool_calls": int(metrics.get("tool_calls", 0)),
        "source": record.get("data_source", ""),
        "agent": str(extra.get("agent", "")),
        "latency_s": metrics.get("latency_s"),
        "snippet": _snippet(record),
    }


def searched_text(record: Mapping[str, Any]) -> str:
    """Everything that the model was told and said, and what tools answered."""
    return "\n".join(_texts(record))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for segment in record["segments"]:
        yield as_text(segment["prompt"])
        yield from (as_text(run["text"]) for run in segment["runs"])


def as_text(text: Any) -> str:
    """A recorder without a tokenizer writes lists of ids."""
    return text if isinstance(text, str) else " ".join(str(piece) for piece in text)


def _snippet(record: Mapping[str, Any]) -> str:
    """The last thing that the model said."""
    said = [as_text(run["text"]) for segment in record["segments"] for run in segment["runs"] if run["mask"]]
    return " ".join(said[-1].split())[:SNIPPET] if said else ""
