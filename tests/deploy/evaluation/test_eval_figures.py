"""pass@k and its intervals against brute force and against known numbers; figures by data source."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deploy.evaluation.episodes import EpisodeResult, ResultsFile, parts_of, result_of
from penstock.deploy.evaluation.report import figures_of
from penstock.deploy.evaluation.statistics import estimate, pass_at_k, wilson
from penstock.trainer import DatasetRow
from penstock.transfer_queue import COMPLETED, Trajectory

outcomes = st.lists(st.booleans(), min_size=1, max_size=9)


@given(right=outcomes, data=st.data())
def test_pass_at_k_is_the_share_of_all_choices(right: list[bool], data: st.DataObject) -> None:
    """Every k of the n samples drawn once: the share that holds a right one."""
    k = data.draw(st.integers(1, len(right)))
    chosen = list(itertools.combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@given(samples=st.integers(1, 400), data=st.data())
def test_pass_at_k_equals_its_binomials(samples: int, data: st.DataObject) -> None:
    """Equation 1 of Chen et al. 2021 in exact integers; rises with k and with what is right."""
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    exact = 1 - math.comb(samples - right, k) / math.comb(samples, k)
    found = pass_at_k(samples, right, k)
    assert found == pytest.approx(exact, abs=1e-9)
    if k > 1:
        assert found >= pass_at_k(samples, right, k - 1) - 1e-12


def test_a_sum_that_rounds_to_just_below_the_full_reward_is_right() -> None:
    results = [
        result_of(Trajectory("eval/0/0#0", "eval/0/0", [], reward, COMPLETED), [DatasetRow([], "a", None, None, {})])
        for reward in (0.7 + 0.2 + 0.1, 0.9999)
    ]
    assert [one is not None and one.right for one in results] == [True, False]


@pytest.mark.parametrize(("samples", "right", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_what_is_no_choice_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_wilson_against_published_numbers() -> None:
    """Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(right / trials, trials) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """95 % of intervals over samples of a known distribution, to within what 300 trials allow."""
    dice, hits = np.random.default_rng(1), 0
    for _ in range(300):
        found = estimate(dice.beta(2, 3, 60).tolist())
        hits += found.low <= 0.4 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


def test_the_same_values_give_the_same_interval() -> None:
    values = np.random.default_rng(0).random(40).tolist()
    one, two = estimate(values), estimate(values)
    assert one == two
    assert one.low < one.value < one.high
    assert estimate([1.0] * 20).low == pytest.approx(wilson(1.0, 20)[0])
    assert estimate([0.5, 0.5]).low == 0.5
    with pytest.raises(ValueError, match="at least one task"):
        estimate([])


def result(row: int, sample: int, source: str, reward: float) -> EpisodeResult:
    return EpisodeResult(row, sample, source, reward, reward >= 1, False, 2, 10)


def test_figures_by_source() -> None:
    """A mean over tasks, not over episodes; what the infrastructure failed is missing, not wrong."""
    results = [result(0, n, "a", float(n < 2)) for n in range(4)]
    results += [result(1, n, "a", 0.0) for n in range(2)]
    results += [result(2, n, "b", 1.0) for n in range(4)]
    found = figures_of(results, 4, {"a": 2, "b": 1})
    assert list(found) == ["a", "b", "all"]
    assert found["a"]["missing"] == 2
    assert found["a"]["avg@4"]["value"] == pytest.approx(0.25)
    assert found["a"]["pass@1"]["value"] == pytest.approx(0.25)
    assert found["a"]["pass@2"]["value"] == pytest.approx((5 / 6 + 0) / 2)
    assert found["a"]["pass@4"]["value"] == 1.0, "the task of two samples says nothing of four"
    assert found["all"]["tasks"] == 3
    assert found["all"]["pass@1"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_parts_hold_every_episode_once() -> None:
    episodes = [episode for part in parts_of(37, 5) for episode in part.episodes]
    assert episodes == [(row, sample) for row in range(37) for sample in range(5)]


def test_a_line_cut_short_is_run_again(tmp_path: Path) -> None:
    (part,) = parts_of(2, 1)
    ResultsFile(tmp_path).add(part, [result(0, 0, "a", 1.0), result(1, 0, "a", 0.0)], [], None)
    file = tmp_path / "episodes.jsonl"
    file.write_text(file.read_text()[:-5])
    unfinished = tmp_path / "trajectories" / ".step_000000.jsonl.1-2.tmp"
    unfinished.write_text('{"episode_id": "of a writer that was killed"}\n')
    found = ResultsFile(tmp_path)
    assert not unfinished.exists()
    assert found.done == {(0, 0)}
    found.add(part, [result(0, 0, "a", 1.0), result(1, 0, "a", 0.0)], [], None)
    assert [json.loads(line)["row"] for line in file.read_text().splitlines()] == [0, 1]
