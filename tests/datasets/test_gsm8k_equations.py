import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.datasets import BadInput, write_gsm8k_equations


def gsm8k(folder: Path, train: list[str], test: list[str]) -> Path:
    for name, answers in (("train", train), ("test", test)):
        lines = [json.dumps({"question": "q", "answer": answer}) for answer in answers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def expressions(path: Path) -> list[str]:
    return [row["extra_info"]["expression"] for row in pq.read_table(path).to_pylist()]


def test_one_task_per_annotation(tmp_path: Path) -> None:
    source = gsm8k(
        tmp_path,
        ["He has 48/2 = <<48/2=24>>24, then <<24+.5=24.5>>24.5\n#### 24.5", "<<5=5>>5 <<9*9=80>>80 <<x*2=4>>"],
        ["<<10/3=3.33>>3.33 and <<48/2=24>>24", "<<1234567*3=3703701>>3703701 <<10/3=3>>"],
    )
    counts = write_gsm8k_equations(source, tmp_path / "out")
    assert expressions(tmp_path / "out/train.parquet") == ["24+0.5"]
    assert expressions(tmp_path / "out/test.parquet") == ["10/3", "48/2"]
    assert counts == {
        "train_annotations": 5,
        "train_trivial": 1,
        "train_disagree": 1,
        "train_unreadable": 1,
        "train_duplicates": 1,
        "train_in_range": 1,
        "train_written": 1,
        "test_annotations": 4,
        "test_duplicates": 1,
        "test_in_range": 2,
        "test_written": 2,
    }


def test_all_rows_and_duplicates_on_request(tmp_path: Path) -> None:
    source = gsm8k(tmp_path, ["<<2+2=4>> <<2+2=4>>"], ["<<1234567*3=3703701>> <<2+2=4>>"])
    write_gsm8k_equations(source, tmp_path / "out", all_rows=True, keep_duplicates=True)
    assert expressions(tmp_path / "out/train.parquet") == ["2+2", "2+2"]
    rows = pq.read_table(tmp_path / "out/test.parquet").to_pylist()
    assert [row["extra_info"]["in_range"] for row in rows] == [False, True]
    assert rows[1]["data_source"] == "gsm8k_equations"


@pytest.mark.parametrize("line", ["{broken", '{"question": "no answer"}', "[1]", '{"answer": 3}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    source = gsm8k(tmp_path, ["<<2+2=4>>"], ["<<3+3=6>>"])
    with (source / "test.jsonl").open("a", encoding="utf-8") as test:
        test.write("\n" + line)
    with pytest.raises(BadInput, match=r"test\.jsonl, line 2"):
        write_gsm8k_equations(source, tmp_path / "out")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"test\.jsonl: no such file"):
        write_gsm8k_equations(tmp_path, tmp_path / "out")
