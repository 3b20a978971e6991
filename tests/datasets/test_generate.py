from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.datasets import BadSpec, materialise, materialise_all, write_calculator
from penstock.datasets.generate import GENERATORS


def test_a_path_stays_itself(tmp_path: Path) -> None:
    assert materialise("data/train.parquet", tmp_path) == "data/train.parquet"


def test_makes_both_splits(tmp_path: Path) -> None:
    train = materialise("generate:calculator/train?train=12&eval=4&seed=5", tmp_path)
    evaluation = materialise("generate:calculator/eval?train=12&eval=4&seed=5", tmp_path)
    assert pq.read_table(train).num_rows == 12
    assert pq.read_table(evaluation).num_rows == 4


def test_makes_splits_of_the_same_options_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def write(folder: Path, *options: int) -> dict[str, int]:
        made.append(folder)
        return write_calculator(folder, *options)

    monkeypatch.setitem(GENERATORS, "calculator", write)
    options = [
        f"generate:calculator/{split}?train=12&eval=4&seed={seed}" for seed in (5, 6) for split in ("train", "eval")
    ]
    paths = materialise_all([*options, "data/train.parquet"], tmp_path)
    assert len(made) == 2
    assert [pq.read_table(path).num_rows for path in paths[:4]] == [12, 4, 12, 4]
    assert paths[4] == "data/train.parquet"


@pytest.mark.parametrize(
    "spec", ["generate:sums", "generate:calculator/train?rows=3", "generate:calculator/train?seed=x"]
)
def test_a_bad_spec_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(BadSpec, match="generate:"):
        materialise(spec, tmp_path)


def test_makes_seeds_that_no_other_split_has(tmp_path: Path) -> None:
    spec = "generate:seeds/{}?train=12&eval=4&seed=5"
    train, evaluation = (
        pq.read_table(materialise(spec.format(split), tmp_path)).to_pylist() for split in ("train", "eval")
    )
    seeds = [row["extra_info"]["seed"] for row in train + evaluation]
    assert seeds == list(range(5, 21))
    assert {row["prompt"][0]["role"] for row in train} == {"system"}
