"""What is in the generated pictures is what their rows say, and the reward takes nothing else."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import RECIPES

from penstock.agent_loops import load_object

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'penstock[vision]'")

pytestmark = pytest.mark.recipes
FOLDER = RECIPES / "vision"


def test_rows_have_an_image_per_mark_and_their_answer(tmp_path: Path) -> None:
    main = load_object(f"{FOLDER / 'data.py'}:main", Path.cwd())
    for folder in ("once", "again"):
        main(["--out", str(tmp_path / folder), "--train", "96", "--eval", "8"])
    rows, again = (pq.read_table(tmp_path / folder / "train.parquet").to_pylist() for folder in ("once", "again"))
    assert rows == again, "the same seed, the same pictures"
    answers = load_object(f"{FOLDER / 'pictures.py'}:ANSWERS", Path.cwd())
    for row in rows:
        assert row["prompt"][0]["content"].count("<image>") == len(row["images"]) == 1
        assert row["reward_model"]["ground_truth"] in answers[row["data_source"].removeprefix("pictures/")]
    drawn = Counter((row["data_source"], row["reward_model"]["ground_truth"]) for row in rows)
    assert len(drawn) == 16, "each answer of each kind"
    views = pq.read_table(tmp_path / "once/screen.parquet").to_pylist()
    wanted = [row["reward_model"]["ground_truth"] for row in views]
    assert wanted == ["/demo/curves", "/demo/trajectories", "/demo/letters", "/demo/compare"]


def test_a_picture_shows_its_answer() -> None:
    from PIL import Image

    picture, colours = (load_object(f"{FOLDER / 'pictures.py'}:{name}", Path.cwd()) for name in ("picture", "COLOURS"))
    dice = Random(7)
    for _ in range(60):
        drawn = picture(dice)
        pixels = np.asarray(Image.open(io.BytesIO(drawn.png)).convert("RGB"), dtype=int).reshape(-1, 3)
        shades = Counter(map(tuple, pixels.tolist()))
        if drawn.kind == "count":
            dark = sum(count for shade, count in shades.items() if max(shade) < 100)
            assert round(dark / 21**2) == ["one", "two", "three", "four"].index(drawn.answer) + 1
        else:
            near: Counter[str | None] = Counter()
            for shade, count in shades.items():
                near[_nearest(shade, colours)] += count
            del near[None]
            assert near.most_common(1)[0][0] == drawn.answer
            assert len(near) == {"colour": 1, "chart": 2}[drawn.kind]


async def test_only_the_right_word_is_rewarded() -> None:
    score = load_object(f"{FOLDER / 'reward.py'}:compute_score", Path.cwd())
    assert [score("", said, "red") for said in ("red", " red\n", "blue", "red red", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def _nearest(pixel: Sequence[int], colours: Mapping[str, Sequence[int]]) -> str | None:
    """The colour that `pixel` is a shade of; None: the ground."""
    apart = {name: max(abs(a - b) for a, b in zip(pixel, own, strict=True)) for name, own in colours.items()}
    return next((name for name, most in apart.items() if most <= 15), None)
