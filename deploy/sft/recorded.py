"""Trajectories that runs and evaluations recorded, as segments with the very ids that were sampled.

    RUN/trajectories/step_*.jsonl ─► completed, min_reward, newest_versions ─► by task: the best, the newest ─► segments

Ids are read, never made from text. That this model's tokenizer gives them the recorded text is checked for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.agent_loops import BadDemonstration, ChatTokens
from penstock.common import iter_jsonl
from penstock.deploy.recipe_tree import ConfigError
from penstock.trainer import SftConfig
from penstock.transfer_queue import OutcomeKind, Segment, is_reached

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A line of a trajectories file, and what it is chosen by."""

    where: str
    """File and line."""
    reward: float
    oldest: int
    """Policy version of its oldest sampled token."""
    newest: int
    record: Record


def choose_recorded(folder: Path, config: SftConfig, dropped: Counter[str]) -> list[RecordedEpisode]:
    """Return the episodes that the settings keep, in the order in which they were recorded; `dropped` counts the others
    by cause.

    Raises `ConfigError` where the folder has none at all.
    """
    files = sorted((folder / "trajectories").glob("*.jsonl"))
    episodes = list(_of_files(files, dropped))
    if not files:
        raise ConfigError(f"sft.runs: {folder} has no trajectories; give the folder of a run or of an evaluation")
    newest = max((one.newest for one in episodes), default=0)
    accepted = []
    for one in episodes:
        if config.min_reward is not None and not is_reached(one.reward, config.min_reward):
            dropped[f"with a reward below {config.min_reward:g}"] += 1
        elif config.newest_versions and one.oldest <= newest - config.newest_versions:
            dropped[f"of versions before {newest - config.newest_versions + 1}"] += 1
        else:
            accepted.append(one)
    if not config.per_task:
        return accepted
    by_task: dict[str, list[RecordedEpisode]] = {}
    for one in accepted:
        by_task.setdefault(prompt_of(one.record), []).append(one)
    best_first = (sorted(alike, key=lambda each: (-each.reward, -each.newest)) for alike in by_task.values())
    chosen = {id(one) for alike in best_first for one in alike[: config.per_task]}
    dropped[f"beyond {config.per_task} of one task"] += len(accepted) - len(chosen)
    return [one for one in accepted if id(one) in chosen]


def _of_files(files: Iterable[Path], dropped: Counter[str]) -> Iterator[RecordedEpisode]:
    """Completed episodes with a reward, each once: a step that was trained again is recorded again."""
    seen = dict[str, RecordedEpisode]()
    for file in files:
        for number, record in enumerate(iter_jsonl(file), start=1):
            outcome = record["outcome"]["kind"]
            if outcome != OutcomeKind.COMPLETED or record["reward"] is None:
                dropped[f"that ended as {outcome}" if record["reward"] is not None else "without a reward"] += 1
                continue
            versions = [span[0] for run in _runs(record) for span in run.get("versions", ())]
            if not versions:
                dropped["in which nothing was sampled"] += 1
                continue
            name, where = str(record["episode_id"]), f"{file}, line {number}"
            seen[name] = RecordedEpisode(where, record["reward"], min(versions), max(versions), record)
    yield from seen.values()


def prompt_of(record: Record) -> str:
    """Names a dataset row over epochs: tasks of the same row have other ids, and the same first prompt."""
    return repr(record["segments"][0]["prompt"])


def recorded_segments(episode: RecordedEpisode, chat: ChatTokens) -> list[Segment]:
    """Raises `BadDemonstration` naming file and line."""
    if any(episode.record.get("images", ())):
        raise BadDemonstration(f"{episode.where}: it has images, which `penstock sft` does not train on")
    try:
        return [one for part in episode.record["segments"] if (one := _segment(part, chat)) is not None]
    except KeyError as error:
        raise BadDemonstration(
            f"{episode.where}: {error} is missing: an earlier version recorded no token ids; record the run again"
        ) from error
    except BadDemonstration as error:
        raise BadDemonstration(f"{episode.where}: {error}") from error


def _segment(part: Mapping[str, Any], chat: ChatTokens) -> Segment | None:
    """None where the segment has no sampled token."""
    runs = part["runs"]
    if not any(run["mask"] for run in runs):
        return None
    prompt = _ids(part["prompt_ids"], part["prompt"], chat)
    ids = [_ids(run["ids"], run["text"], chat) for run in runs]
    length = sum(len(one) for one in ids)
    return Segment(
        prompt_ids=prompt,
        response_ids=np.concatenate(ids),
        response_mask=np.repeat([run["mask"] for run in runs], [len(one) for one in ids]).astype(np.uint8),
        response_logprobs=np.zeros(length, dtype=np.float32),
        version_spans=np.array([[0, 0, length]], dtype=np.int32),
        turn_starts=np.zeros(1, dtype=np.int32),
    )


def _ids(ids: list[int], text: Any, chat: ChatTokens) -> np.ndarray:
    """Raises `BadDemonstration` if this tokenizer reads them otherwise."""
    known = isinstance(text, str) and max(ids, default=0) < len(chat.tokenizer)
    read = chat.decode(ids) if known else ids
    if read != text:
        raise BadDemonstration(
            f"another tokenizer recorded it: {len(ids)} ids read {str(read)[:60]!r} here, and {str(text)[:60]!r} there"
        )
    return np.array(ids, dtype=np.int32)


def _runs(record: Record) -> Iterator[Mapping[str, Any]]:
    return (run for part in record["segments"] for run in part["runs"])
