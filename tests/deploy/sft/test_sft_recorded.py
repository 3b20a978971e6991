"""Trajectories of a run as data of `penstock sft`: the very ids, chosen by reward, version and task."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.deploy.sft_data import MODEL, tool_trace

pytest.importorskip("transformers")

from penstock.agent_loops import AgentConfig, BadDemonstration, ChatTokens, segments_of
from penstock.agent_loops.chat import chat_of
from penstock.deploy import ConfigError
from penstock.deploy.sft.prepared import why_dropped
from penstock.deploy.sft.recorded import choose_recorded, recorded_segments
from penstock.trainer import SftConfig, readable_trajectory
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind, Segment, Trajectory

ROUNDED = 0.7 + 0.2 + 0.1
"""Just below 1."""


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return chat_of(str(MODEL), AgentConfig())


def sampled(chat: ChatTokens, expression: str, version: int) -> Segment:
    (segment,) = segments_of(chat, tool_trace(expression))
    return replace(segment, version_spans=np.array([[version, 0, len(segment.response_ids)]], dtype=np.int32))


def episode(
    chat: ChatTokens, name: str, expression: str, reward: float | None, version: int, outcome: Outcome = COMPLETED
) -> Trajectory:
    return Trajectory(name, name.partition("#")[0], [sampled(chat, expression, version)], reward, outcome)


def record(folder: Path, chat: ChatTokens, step: int, episodes: Sequence[Trajectory]) -> Path:
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(readable_trajectory(one, None, chat.tokenizer)) + "\n" for one in episodes)
    (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text(text)
    return folder


@pytest.fixture
def run(tmp_path: Path, chat: ChatTokens) -> Path:
    """Two steps: tasks 1+1 and 2+2, members with rewards 0, 0.5 and 1."""
    record(
        tmp_path,
        chat,
        0,
        [
            episode(chat, "train/0/1#0", "1+1", 1.0, 0),
            episode(chat, "train/0/1#1", "1+1", 0.0, 0),
            episode(chat, "train/0/2#0", "2+2", 0.5, 0),
            episode(chat, "train/0/2#1", "2+2", 1.0, 0, Outcome(OutcomeKind.TRUNCATED, "length")),
        ],
    )
    return record(
        tmp_path,
        chat,
        3,
        [episode(chat, "train/1/1#0", "1+1", 1.0, 3), episode(chat, "train/1/2#0", "2+2", ROUNDED, 3)],
    )


def chosen(run: Path, **settings: Any) -> tuple[list[str], Counter[str]]:
    dropped = Counter[str]()
    found = choose_recorded(run, SftConfig(**settings), dropped)
    return [one.record["episode_id"] for one in found], dropped


@pytest.mark.parametrize(
    ("settings", "names", "dropped"),
    [
        ({}, ["train/0/1#0", "train/0/1#1", "train/0/2#0", "train/1/1#0", "train/1/2#0"], {}),
        ({"min_reward": 1.0}, ["train/0/1#0", "train/1/1#0", "train/1/2#0"], {"with a reward below 1": 2}),
        ({"newest_versions": 2}, ["train/1/1#0", "train/1/2#0"], {"of versions before 2": 3}),
        ({"per_task": 1}, ["train/1/1#0", "train/1/2#0"], {"beyond 1 of one task": 3}),
        (
            {"per_task": 2, "min_reward": 0.5},
            ["train/0/1#0", "train/0/2#0", "train/1/1#0", "train/1/2#0"],
            {"with a reward below 0.5": 1},
        ),
    ],
)
def test_filters(settings: dict[str, Any], names: list[str], dropped: dict[str, int], run: Path) -> None:
    found, why = chosen(run, **settings)
    assert found == names
    assert {cause: count for cause, count in why.items() if count} == {"that ended as truncated": 1, **dropped}


def test_ids_and_mask_are_the_recorded_ones(run: Path, chat: ChatTokens) -> None:
    """Also of tokens that the tokenizer would not choose for their text."""
    segment = sampled(chat, "3+3", 4)
    odd = [number for letter in chat.decode(segment.response_ids[-3:-1].tolist()) for number in chat.encode(letter)]
    ids = np.array([*segment.response_ids[:-3].tolist(), *odd, segment.response_ids[-1]], dtype=np.int32)
    ours = np.ones(len(odd) + 1, dtype=np.uint8)
    mask = np.concatenate([segment.response_mask[:-3], ours])
    spans = np.array([[4, 0, len(ids)]], dtype=np.int32)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    given = replace(segment, response_ids=ids, response_mask=mask, response_logprobs=logprobs, version_spans=spans)
    record(run, chat, 9, [Trajectory("train/2/3#0", "train/2/3", [given], 1.0, COMPLETED)])
    *_, newest = choose_recorded(run, SftConfig(), Counter())
    (read,) = recorded_segments(newest, chat)
    np.testing.assert_array_equal(read.prompt_ids, given.prompt_ids)
    np.testing.assert_array_equal(read.response_ids, given.response_ids)
    np.testing.assert_array_equal(read.response_mask, given.response_mask)


def test_what_another_tokenizer_recorded_is_refused(run: Path, chat: ChatTokens) -> None:
    file = run / "trajectories" / "step_000000.jsonl"
    line = json.loads(file.read_text().splitlines()[0])
    line["segments"][0]["prompt_ids"][0] += 1
    file.write_text(json.dumps(line) + "\n")
    one = choose_recorded(run, SftConfig(), Counter())[0]
    with pytest.raises(BadDemonstration, match=r"step_000000\.jsonl, line 1: another tokenizer"):
        recorded_segments(one, chat)
    del line["segments"][0]["prompt_ids"]
    file.write_text(json.dumps(line) + "\n")
    one = choose_recorded(run, SftConfig(), Counter())[0]
    with pytest.raises(BadDemonstration, match="recorded no token ids"):
        recorded_segments(one, chat)


def test_a_folder_without_trajectories_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.runs: .* has no trajectories"):
        choose_recorded(tmp_path, SftConfig(), Counter())


def test_an_episode_without_a_reward_is_counted() -> None:
    cancelled = SimpleNamespace(task_id="rehearsal/0", reward=None, outcome=Outcome(OutcomeKind.CANCELLED, "stopped"))
    right = SimpleNamespace(task_id="rehearsal/0", reward=ROUNDED, outcome=COMPLETED)
    check = SimpleNamespace(failures=[], trajectories=[cancelled, right])
    assert why_dropped(check, [1.0]) == {"with reward none, below 1, cancelled (stopped)": 1}
