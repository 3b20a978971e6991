"""A bisection reads the fall from the run's records, and blames the steps and episodes that an oracle blames."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tests.deploy.archived import episode

from penstock.common import append_jsonl
from penstock.deploy import ConfigError, RunDir
from penstock.deploy.bisection.cause import cause_of, steps_in_words
from penstock.deploy.bisection.collapse import Fall, Stretch, fall_of, recorded_metric, stretches_of
from penstock.deploy.bisection.tries import Judgement, Tries, TryResult
from penstock.transfer_queue import Archive

REWARDS = [0.3, 0.5, 0.7, 0.9, 0.85, 0.9, 0.2, 0.1, 0.0]
GUILTY = {"train/5/0#1", "train/5/1#0"}
"""Episodes each of which makes the weights collapse."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Nine steps of two groups with three episodes, sampled by the newest version; a checkpoint after each fourth."""
    run = RunDir(tmp_path / "run")
    archive, groups = archive_of(run), {}
    for step in range(len(REWARDS)):
        groups[step] = [[f"train/{step}/{group}#{member}" for member in range(3)] for group in range(2)]
        names = [one for group in groups[step] for one in group]
        archive.append(step, [episode(one, 1e6 if one in GUILTY else REWARDS[step], step) for one in names])
    archive.commit(len(REWARDS), groups)
    append_jsonl(run.metrics, [{"step": step, "reward": value} for step, value in enumerate(REWARDS)])
    (run.root / "bisects").mkdir()
    for step in (4, 8):
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    return run


def archive_of(run: RunDir) -> Archive:
    return Archive(run.archive, "run", 1 << 30)


class ScriptedTries(Tries):
    """Weights that have collapsed if a guilty episode was trained."""

    carried_out = 0

    def _carry_out(self, stretch: Stretch, left_out: Collection[str | int]) -> TryResult:
        self.carried_out += 1
        trained = [step for step in stretch.steps if step not in left_out]
        if not trained or 5 not in trained:
            return TryResult(0.85, 0.8, 0.9)
        is_bad = any(one not in left_out for one in GUILTY)
        return TryResult(0.1, 0.0, 0.2) if is_bad else TryResult(0.8, 0.45, 0.95)


def tries_of(run: RunDir, most: int = 40) -> ScriptedTries:
    judgement = Judgement("reward", 0.5, (), 1, 1.0)
    return ScriptedTries(run.root, run.root / "bisects", most, judgement, Console(quiet=True))


def stretches(run: RunDir, first: int = 0) -> Sequence[Stretch]:
    fall = fall_of(recorded_metric(run, "reward"), 0.5, first)
    return list(stretches_of(run, archive_of(run), fall))


def test_the_stretch_begins_at_the_newest_checkpoint_before_the_last_healthy_step(run: RunDir) -> None:
    first, *later = stretches(run)
    assert first == Stretch(start=4, end=6, step=6, healthy=(4, 5))
    assert [(one.start, one.end, one.step) for one in later] == [(4, 7, 7), (4, 8, 8)]


def test_the_step_and_the_episodes_that_undo_the_collapse_are_found(run: RunDir) -> None:
    cause = cause_of(tries_of(run), stretches(run), archive_of(run))
    assert (cause.steps.items, cause.steps.is_minimal) == ((5,), True)
    assert ({one.episode for one in cause.episodes.items}, cause.episodes.is_minimal) == (GUILTY, True)
    assert (cause.of_episodes, cause.with_all.value, cause.without_episodes.value) == (6, 0.1, 0.8)
    assert cause.close == 2, "intervals without episodes alone include 0.5"
    assert json.loads(json.dumps(cause.as_json()))["steps"] == [5]


def test_tries_of_an_earlier_call_are_not_repeated(run: RunDir) -> None:
    first, second = tries_of(run), tries_of(run)
    cause = cause_of(first, stretches(run), archive_of(run))
    again = cause_of(tries_of(run), stretches(run), archive_of(run))
    assert (again, second.carried_out) == (cause, 0)
    assert cause.tries == first.carried_out == len((run.root / "bisects" / "tries.jsonl").read_text().splitlines())


def test_used_up_tries_are_reported_as_such(run: RunDir) -> None:
    cause = cause_of(tries_of(run, most=5), stretches(run), archive_of(run))
    assert not cause.episodes.is_minimal
    assert {one.episode for one in cause.episodes.items} > GUILTY
    with pytest.raises(ConfigError, match="--tries 1: used up"):
        cause_of(tries_of(run, most=1), stretches(run), archive_of(run))


def test_a_fall_that_no_weights_show_is_refused(run: RunDir) -> None:
    class Healthy(ScriptedTries):
        def _carry_out(self, stretch: Stretch, left_out: Collection[str | int]) -> TryResult:
            return TryResult(0.9, 0.8, 1.0)

    tries = Healthy(run.root, run.root / "bisects", 40, tries_of(run).judgement, Console(quiet=True))
    with pytest.raises(ConfigError, match=r"at last reward 0\.9.*in the batches"):
        cause_of(tries, stretches(run), archive_of(run))
    assert len(tries.results) == 3, "each step below the bound was asked for its weights"


def test_a_model_that_had_yet_to_learn_is_searched_from_the_last_healthy_version(run: RunDir) -> None:
    class Learning(ScriptedTries):
        def _carry_out(self, stretch: Stretch, left_out: Collection[str | int]) -> TryResult:
            trained = [step for step in stretch.steps if step not in left_out]
            return TryResult(0.9 if 4 in trained and 5 not in trained else 0.1, 0.0, 1.0)

    tries = Learning(run.root, run.root / "bisects", 40, tries_of(run).judgement, Console(quiet=True))
    assert cause_of(tries, stretches(run), archive_of(run)).steps.items == (5,)


def test_what_cannot_be_searched_is_refused_by_name(run: RunDir) -> None:
    values = recorded_metric(run, "reward")
    for below, first, message in (
        (-1.0, 0, "never below it .its lowest is 0"),
        (0.95, 0, "below it at every step from 0 on"),
        (0.5, 7, "below it at every step from 7 on"),
        (0.86, 3, "only single steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            fall_of({step: value for step, value in values.items() if below != 0.86 or step < 6}, below, first)
    with pytest.raises(ConfigError, match=r"--metric entropy: .*response_length_mean"):
        recorded_metric(run, "entropy")
    archive_of(run).prune(0, 6)
    with pytest.raises(ConfigError, match=r"step 5 is not there.*steps 6 to 8"):
        list(stretches_of(run, archive_of(run), Fall([6, 7], 5)))
    with pytest.raises(ConfigError, match="no checkpoint at or before version 7"):
        list(stretches_of(run, archive_of(run), Fall([8], 7)))


@pytest.mark.parametrize(("steps", "words"), [([3], "step 3"), ([3, 4, 5, 9], "steps 3-5, 9"), ([2, 4], "steps 2, 4")])
def test_steps_are_named_by_their_runs(steps: list[int], words: str) -> None:
    assert steps_in_words(steps) == words
