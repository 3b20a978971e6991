"""`penstock archive compare`, `group` and `diff`: what people ask of the episodes that a run trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.transfer_queue import COMPLETED, Archive, Outcome, OutcomeKind, Segment, Trajectory

TRUNCATED = Outcome(OutcomeKind.TRUNCATED, "length", "engine")


def episode(
    name: str, reward: float, prompt: Sequence[int], sampled: Sequence[int], outcome: Outcome = COMPLETED
) -> Trajectory:
    """Two turns of as many ids; between them 9 is fed."""
    half = len(sampled) // 2
    ids = [*sampled[:half], 9, *sampled[half:]]
    mask = [1] * half + [0] + [1] * (len(sampled) - half)
    segment = Segment(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(ids, np.int32),
        response_mask=np.array(mask, np.uint8),
        response_logprobs=np.array([-0.5 * one for one in mask], np.float32),
        version_spans=np.array([[0, 0, len(ids)]], np.int32),
        turn_starts=np.array([0, half + 1], np.int32),
    )
    return Trajectory(name, name.partition("#")[0], [segment], reward, outcome, num_turns=2, data_source="sums")


@pytest.fixture
def folder(bare_run: Path) -> Path:
    """Steps 0 and 3 play the tasks 1 and 2, step 3 also a new one."""
    archive = Archive(bare_run / "archive", "mine", 1 << 30)
    steps = {
        0: [
            episode("train/0#0", 0.0, [1], [3, 3, 4, 4], TRUNCATED),
            episode("train/0#1", 1.0, [1], [3, 3, 5, 4]),
            episode("train/1#0", 1.0, [2], [3, 3, 5, 4]),
            episode("train/1#1", 1.0, [2], [3, 3, 5, 4]),
        ],
        3: [
            episode("train/6#0", 1.0, [1], [3, 3, 5, 4]),
            episode("train/7#0", 0.0, [2], [4, 3], TRUNCATED),
            episode("train/8#0", 0.5, [7], [4, 3], TRUNCATED),
        ],
    }
    groups: dict[int, list[list[str]]] = {}
    for step, episodes in steps.items():
        archive.append(step, episodes)
        groups[step] = [[one.episode_id] for one in episodes]
    archive.commit(4, groups)
    return bare_run


def ask(command: str, folder: Path, *words: str) -> Any:
    ended = CliRunner().invoke(app, ["archive", command, str(folder), *words, "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def test_stretches_are_compared_by_the_tasks_that_both_have(folder: Path) -> None:
    answer = ask("compare", folder, "0-2", "3", "--limit", "2")
    sums = [(one["episodes"], one["reward"], one["tokens"]) for one in answer["stretches"]]
    assert sums == [(4, 0.75, 4.0), (3, 0.5, pytest.approx(8 / 3))]
    assert answer["tasks"] == 2, "the third was played in one stretch alone"
    assert answer["fallen"] == [{"before": 1.0, "after": 0.0, "best_before": "train/1#1", "worst_after": "train/7#0"}]
    assert answer["risen"] == [{"before": 0.5, "after": 1.0, "best_before": "train/0#1", "worst_after": "train/6#0"}]
    assert answer["faults"] == {"truncated (length)": [0.25, pytest.approx(2 / 3)]}
    assert [line["episode"] for line in answer["worst"]] == ["train/7#0", "train/8#0"]
    assert [line["episode"] for line in answer["best"]] == ["train/6#0", "train/8#0"]


def test_a_group_parts_where_its_ids_do(folder: Path) -> None:
    best, other = ask("group", folder, "train/0")
    assert (best["episode"], best["reward"], best["parts"]) == ("train/0#1", 1.0, None)
    assert (other["episode"], other["parts"]["turn"]) == ("train/0#0", 2)
    assert (other["parts"]["best"], other["parts"]["other"]) == ("5, 4]", "4, 4]")


def test_two_episodes_are_compared_part_by_part(folder: Path) -> None:
    parts = ask("diff", folder, "train/0#0", "train/0#1")["parts"]
    assert [(one["kind"], one["equal"]) for one in parts] == [
        ("prompt", True),
        ("sampled", True),
        ("fed", True),
        ("sampled", False),
    ]
    assert parts[-1]["texts"] == ["[4, 4]", "[5, 4]"]
    shown = CliRunner().invoke(app, ["archive", "diff", str(folder), "train/0#0", "train/0#1"]).stdout
    assert shown.splitlines()[-3:] == ["── sampled, different", "- [4, 4]", "+ [5, 4]"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "0", "x-3"), "write a step, or FIRST-LAST such as 0-9"),
        (("compare", "0", "1"), "1: not in the archive"),
        (("group", "train/5"), "train/5: not in the archive"),
        (("diff", "train/0#0", "train/5#0"), "train/5#0: not in the archive"),
    ],
)
def test_what_the_archive_lacks_is_named(folder: Path, words: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(app, ["archive", words[0], str(folder), *words[1:]])
    assert (ended.exit_code, said in " ".join(ended.stderr.split())) == (2, True), ended.output
