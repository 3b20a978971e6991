"""A tiny vision-language model from guesses to what it sees, by reward alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.recipes.conftest import RECIPES, assert_learned, played, steps_of

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'penstock[vision]'")

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
]
WINDOW = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's data and its base model."""
    folder = tmp_path_factory.mktemp("vision")
    for script, out in (("data.py", folder), ("make_model.py", folder / "model")):
        command = [sys.executable, str(RECIPES / "vision" / script), "--out", str(out)]
        subprocess.run(command, check=True, timeout=900)
    return folder


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("null", 0.0)])
async def test_the_right_answer_earns_everything(made: Path, policy: str, reward: float) -> None:
    given = (f"data.train={made / 'train.parquet'}", f"model={made / 'model'}")
    found = await played("vision/cpu.yaml", policy, *given, rows=12)
    assert (found.failures, found.rewards) == ([], [reward] * 12)
    assert [len(one.images.by_segment[0]) for one in found.trajectories] == [1] * 12


def test_a_tiny_model_learns_to_answer_by_what_it_sees(start_run, made: Path) -> None:
    data = (f"data.train={made / 'train.parquet'}", "data.eval=null", f"model={made / 'model'}")
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.9", f"trainer.stop.window={WINDOW}")
    run = start_run("vision", *data, *goal, recipe=RECIPES / "vision/cpu.yaml")
    assert_learned(run, window=WINDOW, first_most=0.45, last_least=0.85)
    assert max(step["logprob_abs_diff_max"] for step in steps_of(run)) < 1e-3
    assert list((run.root / "images").iterdir()), "recorded episodes have their pictures"
