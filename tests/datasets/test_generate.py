from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.datasets import BadSpec, materialise


def test_a_path_stays_itself(tmp_path: Path) -> None:
    assert materialise("data/train.parquet", tmp_path) == "data/train.parquet"


def test_makes_both_splits(tmp_path: Path) -> None:
    train = materialise("generate:calculator/train?train=12&eval=4&seed=5", tmp_path)
    evaluation = materialise("generate:calculator/eval?train=12&eval=4&seed=5", tmp_path)
    assert pq.read_table(train).num_rows == 12
    assert pq.read_table(evaluation).num_rows == 4


@pytest.mark.parametrize(
    "spec", ["generate:sums", "generate:calculator/train?rows=3", "generate:calculator/train?seed=x"]
)
def test_a_bad_spec_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(BadSpec, match="generate:"):
        materialise(spec, tmp_path)
