"""The notebook without a model: who keeps every digit earns everything, who forgets earns nothing."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import played, script

pytestmark = pytest.mark.recipes
MODEL = "model=recipes/calculator/model"


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    script("compaction/data.py").main(["--out", str(folder), "--train", "24", "--eval", "8", "--conversations", "40"])
    return folder


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("forgetful", 0.0)])
async def test_what_summaries_keep_is_what_is_earned(notebooks: Path, policy: str, reward: float) -> None:
    data = f"data.train={notebooks / 'train.parquet'}"
    found = await played("compaction/cpu.yaml", policy, MODEL, data)
    assert found.failures == []
    assert found.rewards == [reward] * 24
    rows = pq.read_table(notebooks / "train.parquet").to_pylist()
    for row, trajectory in zip(rows, found.trajectories, strict=True):
        pages = len(row["extra_info"]["digits"])
        assert [segment.num_turns for segment in trajectory.segments] == [3] * (pages // 2) + [1 + pages % 2]


async def test_a_part_of_the_digits_is_a_part_of_the_reward() -> None:
    score = script("compaction/pages.py").compute_score
    said = [score("", text, "1234", {"final_text": text}) for text in ("1234", "1239", "123", "1 2 3 4.", "")]
    assert said == [1.0, 0.75, 0.0, 1.0, 0.0]
