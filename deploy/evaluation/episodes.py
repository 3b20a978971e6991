"""Results of single episodes, kept as they come in: an evaluation that was killed continues and does not repeat them.

episodes.jsonl            one line per episode that carries a reward
trajectories/step_*.jsonl the episodes to read, and to fine-tune on (`sft.runs`), one file per part
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.common import append_jsonl, read_jsonl, rewrite_jsonl
from penstock.deploy.rehearsal import full_reward
from penstock.trainer import DatasetRow, readable_trajectory
from penstock.transfer_queue import OutcomeKind, Task, Trajectory, is_reached

PART = 64
"""Episodes that are submitted, collected and recorded together."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """A line of episodes.jsonl."""

    row: int
    """Index into the evaluation's rows."""
    sample: int
    """0 … n − 1"""
    data_source: str
    reward: float
    right: bool
    """The reward is at least what a right answer earns."""
    truncated: bool
    num_turns: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """Up to `PART` episodes, a split of the queue: the same ones in every life of the evaluation."""

    number: int
    episodes: Sequence[tuple[int, int]]
    """(row, sample)"""

    @property
    def split(self) -> str:
        return f"eval-{self.number:06d}"


def parts_of(rows: int, samples: int) -> list[Part]:
    episodes = [(row, sample) for row in range(rows) for sample in range(samples)]
    return [Part(number, episodes[start : start + PART]) for number, start in enumerate(range(0, len(episodes), PART))]


def task_of(part: Part, row: int, sample: int, data: DatasetRow, temperature: float) -> Task:
    name = f"{part.split}/{row:08d}/{sample:04d}"
    return data.task(name, part.split, sampling={"temperature": temperature})


def result_of(trajectory: Trajectory, rows: Sequence[DatasetRow]) -> EpisodeResult | None:
    """None if it carries no reward. Raises `DataError` if a row's full reward is not a number."""
    if trajectory.reward is None:
        return None
    row, sample = (int(word) for word in trajectory.task_id.split("/")[-2:])
    return EpisodeResult(
        row=row,
        sample=sample,
        data_source=rows[row].data_source,
        reward=trajectory.reward,
        right=is_reached(trajectory.reward, full_reward(rows[row])),
        truncated=trajectory.outcome.kind is OutcomeKind.TRUNCATED,
        num_turns=trajectory.num_turns,
        response_tokens=sum(len(segment.response_ids) for segment in trajectory.segments),
    )


class ResultsFile:
    """One writer. A line that a killed writer cut short is left out, and its episode runs again; a file that it had
    not finished goes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "episodes.jsonl"
        self._trajectories = folder / "trajectories"
        for unfinished in self._trajectories.glob(".*.tmp"):
            unfinished.unlink()
        lines = read_jsonl(self._file)
        rewrite_jsonl(self._file, lines)
        self.results = [EpisodeResult(**line) for line in lines]

    @property
    def done(self) -> set[tuple[int, int]]:
        """(row, sample)"""
        return {(one.row, one.sample) for one in self.results}

    def add(
        self, part: Part, results: Iterable[EpisodeResult], trajectories: Iterable[Trajectory], tokenizer: Any
    ) -> None:
        """Texts first: a line of episodes.jsonl says that the episode is not needed any more."""
        self._trajectories.mkdir(exist_ok=True)
        file = self._trajectories / f"step_{part.number:06d}.jsonl"
        records = {record["episode_id"]: record for record in read_jsonl(file)}
        records |= {one.episode_id: readable_trajectory(one, None, tokenizer) for one in trajectories}
        rewrite_jsonl(file, records.values())
        done = self.done
        new = [one for one in results if (one.row, one.sample) not in done]
        append_jsonl(self._file, [asdict(one) for one in new])
        self.results += new
