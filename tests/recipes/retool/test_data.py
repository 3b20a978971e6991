"""What raw datasets become; rows of the published files' shapes, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import script

from penstock.trainer import load_rows

pytestmark = pytest.mark.recipes
data = script("retool/data.py")


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def truths(path: Path) -> list[Any]:
    return [row.ground_truth for row in load_rows(path)]


def test_arithmetic_is_whole_and_its_splits_share_nothing(tmp_path: Path) -> None:
    data.main(["arithmetic", "--out", str(tmp_path), "--train", "64", "--eval", "16"])
    train, held_out = load_rows(tmp_path / "train.parquet"), load_rows(tmp_path / "eval.parquet")
    assert (len(train), len(held_out)) == (64, 16)
    assert all(row.ground_truth == str(int(row.ground_truth)) for row in [*train, *held_out])
    expressions = [{row.extra_info["expression"] for row in rows} for rows in (train, held_out)]
    assert expressions[0].isdisjoint(expressions[1])


def test_sums_in_parts_show_a_prompt_their_first_part_alone(tmp_path: Path) -> None:
    data.main(["steps", "--out", str(tmp_path), "--train", "64", "--eval", "16", "--conversations", "8"])
    train, held_out = load_rows(tmp_path / "train.parquet"), load_rows(tmp_path / "eval.parquet")
    assert (len(train), len(held_out)) == (64, 16)
    sums = [[row.extra_info["parts"] for row in rows] for rows in (train, held_out)]
    assert len({*sums[0], *sums[1]}) == 80
    for row in [*train, *held_out]:
        first, *later = row.extra_info["parts"].split()
        results = row.extra_info["results"].split()
        assert row.messages == [{"role": "user", "content": f"What is {first}, then?"}]
        assert results[0] == str(eval(first))
        assert results[1:] == [str(eval(result + part)) for result, part in zip(results, later, strict=False)]
        assert len(set(results)) == len(later) + 1 >= 3
        assert row.ground_truth == results[-1]


def test_the_cold_start_stops_in_a_third_of_the_places(tmp_path: Path) -> None:
    data.main(["steps", "--out", str(tmp_path), "--train", "8", "--eval", "8", "--conversations", "2000"])
    shown = [json.loads(line)["messages"] for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    told = [turn["content"].split() for turns in shown for turn in turns[:-1] if turn["role"] == "tool"]
    ends = [turns[-2]["content"].split() for turns in shown]
    assert [turns[-1]["content"] for turns in shown] == [result for result, *_ in ends]
    share = sum(len(one) == 3 for one in ends) / sum(len(one) == 3 for one in told)
    assert abs(share - data.STOPS) < 0.04
    assert 0.25 < sum(len(one) == 1 for one in ends) / len(shown) < 0.45


def test_gsm8k_keeps_question_and_solution(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "It is <<600*2=1200>>1,200.\n#### 1,200"}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out")])
    (row,) = load_rows(tmp_path / "out/train.parquet")
    assert (row.ground_truth, row.data_source) == ("1200", "openai/gsm8k")
    assert row.extra_info["answer"] == rows[0]["answer"]
    assert [message["role"] for message in row.messages] == ["system", "user"]


def test_gsm8k_can_be_limited_by_calculations(tmp_path: Path) -> None:
    solutions = [
        "#### 1",
        "<<1+1=2>>2\n#### 2",
        "<<1+1=2>>2 <<2+1=3>>3\n#### 3",
        "<<1+1=2>><<2+1=3>><<3+1=4>>4\n#### 4",
    ]
    lines = "".join(json.dumps({"question": "How many?", "answer": text}) + "\n" for text in solutions)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines)
    data.main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out"), "--calls", "2"])
    assert [row.ground_truth for row in load_rows(tmp_path / "out/train.parquet")] == ["2", "3"]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "line 2: not GSM8K's"), ('{"question": "x", "answer": "#### many"}', "line 2: not GSM8K's")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"question": "x", "answer": "#### 1"}}\n{line}\n')
    with pytest.raises(SystemExit, match=words):
        data.main(["gsm8k", "--input", str(tmp_path), "--out", str(tmp_path / "out")])


def test_dapo_takes_each_problem_once_without_its_instructions(tmp_path: Path) -> None:
    text = (
        "Solve the following math problem step by step. The last line of your response is of the form Answer: x.\n\n"
        'What is $1+1$?\n\nRemember to put your answer on its own line after "Answer:".'
    )
    row = {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "2", "style": "rule"}}
    source = parquet(tmp_path / "dapo.parquet", [row, row, row])
    data.main(["dapo", "--input", str(source), "--out", str(tmp_path)])
    (made,) = load_rows(tmp_path / "train.parquet")
    assert (made.messages[1]["content"], made.ground_truth, made.data_source) == ("What is $1+1$?", "2", "math_dapo")


@pytest.mark.parametrize(
    ("year", "row"), [(2024, {"Problem": "p", "Answer": 25}), (2025, {"problem": "p", "answer": "025"})]
)
def test_aime_answers_are_whole_numbers(tmp_path: Path, year: int, row: dict[str, Any]) -> None:
    source = parquet(tmp_path / "aime.parquet", [row])
    data.main(["aime", "--year", str(year), "--input", str(source), "--out", str(tmp_path)])
    assert truths(tmp_path / f"aime{year}.parquet") == ["25"]
    assert load_rows(tmp_path / f"aime{year}.parquet")[0].data_source == f"aime{year}"


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    source = parquet(tmp_path / "aime.parquet", [{"question": "p"}])
    with pytest.raises(SystemExit, match=r"aime\.parquet, row 1: no 'Problem'; it has question"):
        data.main(["aime", "--input", str(source), "--out", str(tmp_path)])


SAID = """First I compute.
<code>
```python
print(6*7)
```
</code>
<interpreter>
42
</interpreter>
So it is 42.
<answer>
\\boxed{42}
</answer>"""


def test_a_demonstration_becomes_calls_and_results(tmp_path: Path) -> None:
    asks = "Solve the problem with code where it helps.\n\n*user question:*\nWhat is 6*7?"
    messages = [{"role": "user", "content": asks}, {"role": "assistant", "content": SAID}]
    source = parquet(tmp_path / "sft.parquet", [{"messages": messages}])
    data.main(["demonstrations", "--input", str(source), "--out", str(tmp_path)])
    (line,) = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    system, user, calls, result, answers = json.loads(line)["messages"]
    assert (system["role"], user["content"]) == ("system", "What is 6*7?")
    assert calls["content"] == "First I compute."
    assert calls["tool_calls"][0]["function"] == {"name": "python", "arguments": {"code": "print(6*7)"}}
    assert (result["role"], result["content"]) == ("tool", "42")
    assert answers["content"].splitlines() == ["So it is 42.", "", "\\boxed{42}"]


def test_a_hub_that_is_not_reached_says_what_to_do(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    argv = [sys.executable, str(Path(data.__file__)), "dapo", "--out", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(Path(data.__file__).parents[2] / "src")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "DAPO-Math-17k cannot be fetched" in done.stderr
    assert "--input" in done.stderr
