from pathlib import Path

import pyarrow.parquet as pq

from penstock.datasets import evaluate, problems, write_calculator


def test_same_seed_same_rows_and_disjoint_splits() -> None:
    train, evaluation = problems(300, 50, seed=3)
    assert (train, evaluation) == problems(300, 50, seed=3)
    assert train != problems(300, 50, seed=4)[0]
    expressions = [row["extra_info"]["expression"] for row in train + evaluation]
    assert len(expressions) == len(set(expressions)) == 350


def test_evaluation_does_not_depend_on_the_size_of_training() -> None:
    assert problems(10, 20, seed=0)[1] == problems(100, 20, seed=0)[1]


def test_writes_verls_columns(tmp_path: Path) -> None:
    assert write_calculator(tmp_path, train=20, evaluation=5, seed=0) == {"train": 20, "eval": 5}
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 20
    row = rows[7]
    expression = row["extra_info"]["expression"]
    assert row["prompt"] == [{"role": "user", "content": f"What is {expression}?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": repr(evaluate(expression))}
    assert row["data_source"] == "calculator"
    assert row["extra_info"] == {"split": "train", "index": 7, "expression": expression, "in_range": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.parquet", "train.parquet"]
