"""Datasets: verl's columns in Parquet and JSONL, errors with file, row and column, one order for ever."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer import DataError, load_rows
from penstock.trainer.data.rows import DataStream
from penstock.transfer_queue import DataCursor

GOOD = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "own"},
    "agent_name": "tool_agent",
    "level": 3,
    "split": "column",
}


def write(path: Path, rows: list) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(b"".join(as_line(row) + b"\n" for row in rows))
    return path


def as_line(row: object) -> bytes:
    return row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_become_a_task(tmp_path: Path, suffix: str) -> None:
    (row,) = load_rows(write(tmp_path / f"data{suffix}", [GOOD]))
    task = row.task("train/1", "train")
    assert list(task.messages) == GOOD["prompt"]
    assert (task.data_source, task.ground_truth, task.agent_name) == ("sums", "2", "tool_agent")
    assert task.extra_info == {"level": 3, "split": "own", "index": 7}


def call(arguments: Any, **keys: Any) -> dict[str, Any]:
    return {**keys, "type": "function", "function": {"name": "look", "arguments": arguments}}


def words(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


HISTORY = [
    {"role": "system", "content": words("Look.")},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}, *words("Where?")]},
    {"role": "assistant", "content": [], "tool_calls": [call({"city": "Köln", "filter": {"kind": "x"}}, id="c1")]},
    {"role": "tool", "content": words("no"), "tool_call_id": "c1"},
    {"role": "assistant", "reasoning": "Elsewhere", "tool_calls": [call({"zip": "50667", "filter": {"near": 5}})]},
    {"role": "tool", "content": words("yes")},
]


TEXTS = {0: "Look.", 2: "", 3: "no", 5: "yes"}


def test_nulls_that_parquet_adds_at_any_depth_are_left_out(tmp_path: Path) -> None:
    (row,) = load_rows(write(tmp_path / "d.parquet", [GOOD | {"prompt": HISTORY}]))
    expected = [one | ({"content": TEXTS[at]} if at in TEXTS else {}) for at, one in enumerate(HISTORY)]
    assert row.messages == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_content_of_text_parts_alone_is_one_text(tmp_path: Path, suffix: str) -> None:
    parts = [*words("Where is "), {"type": "input_text", "text": "Köln?"}]
    (row,) = load_rows(write(tmp_path / f"d{suffix}", [GOOD | {"prompt": [{"role": "user", "content": parts}]}]))
    assert row.messages == [{"role": "user", "content": "Where is Köln?"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_json_text_becomes_objects_and_its_nulls_are_meant(tmp_path: Path, suffix: str) -> None:
    meant = {"city": None, "days": [1, None]}
    told = {"role": "assistant", "content": "", "tool_calls": [call(meant), call({})]}
    history = [GOOD["prompt"][0], told, {"role": "tool", "content": "[1]"}]
    as_text = {**told, "tool_calls": [call(json.dumps(meant)), {"name": "look", "arguments": ""}]}
    prompts = [[GOOD["prompt"][0], as_text, history[2]], json.dumps(history)]
    prompts += [[GOOD["prompt"][0], {**told, "tool_calls": json.dumps(told["tool_calls"])}, history[2]]]
    for number, prompt in enumerate(prompts):
        (row,) = load_rows(write(tmp_path / f"{number}{suffix}", [GOOD | {"prompt": prompt}]))
        assert row.messages == history


def test_nulls_of_jsonl_stay_in_arguments_alone(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Where?", "image": None}]
    told = {"role": "assistant", "content": None, "tool_calls": [call({"city": None})], "name": None}
    (row,) = load_rows(write(tmp_path / "d.jsonl", [GOOD | {"prompt": [{"role": "user", "content": parts}, told]}]))
    assert row.messages == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": [call({"city": None})]},
    ]


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ["\ufeff" + json.dumps(GOOD), GOOD])
    assert [row.ground_truth for row in load_rows(path)] == ["2", "2"]


def test_the_first_rows_only(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [GOOD, GOOD, "broken"])
    assert len(load_rows(path, limit=2)) == 2


def truth(value: Any) -> dict[str, Any]:
    return GOOD | {"reward_model": {"ground_truth": value}}


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth - 1):
        made = [made]
    return made


BAD_ROWS = [
    ({k: v for k, v in GOOD.items() if k != "reward_model"}, "column 'reward_model' is missing; found agent_name, d"),
    ("{", "the line is not valid JSON"),
    ("", "the line is empty"),
    ("[1]", "expected an object, found list"),
    (GOOD | {"prompt": []}, r"prompt must be a list of chat messages, found \[\]"),
    (GOOD | {"prompt": "text"}, "prompt must be a list of chat messages: its text is not valid JSON: .*; found 'text'"),
    (GOOD | {"prompt": "5"}, "prompt must be a list of chat messages, found 5"),
    (GOOD | {"prompt": [{"role": "user", "content": ""}]}, r"prompt\[0\]\.content is empty"),
    (
        GOOD | {"prompt": [{"role": "user", "content": "1+1? \ud83d"}]},
        r"prompt\[0\]\.content: half of a surrogate pair",
    ),
    (truth(math.factorial(30)), r"reward_model\.ground_truth: an integer over 64 bits.* write it as text"),
    (truth(nested(600)), r"reward_model\.ground_truth.*: nested too deeply"),
    (
        f'{{"prompt": {json.dumps(nested(900)).replace("[", "[[[").replace("]", "]]]")}}}',
        "the line is nested too deeply",
    ),
    (GOOD | {"extra_info": {"a": [{"b": "\udc00"}]}}, r"extra_info\.a\[0\]\.b: half of a surrogate pair"),
    (GOOD | {"extra_info": {"\ud83d": 1}}, "extra_info: half of a surrogate pair"),
    (GOOD | {"data_source": "two\nlines"}, "data_source must be at most 200 printable"),
    (truth(math.nan), "reward_model.ground_truth is NaN, which equals no answer"),
    (truth(["4", math.nan]), r"reward_model\.ground_truth\[1\] is NaN, which equals no answer"),
    (truth({"a": 1, "b": [{"c": math.nan}]}), r"reward_model\.ground_truth\.b\[0\]\.c is NaN, which equals no answer"),
    (GOOD | {"reward_model": '{"ground_truth": "2"}'}, "reward_model is text, an object is needed"),
    (
        json.dumps(GOOD, ensure_ascii=False).replace("1 + 1", "1 é 1").encode("latin-1"),
        "not UTF-8: .*; convert the file, for example `iconv -f latin1 ",
    ),
    (json.dumps(GOOD).encode("utf-16"), "not UTF-8: .*; convert the file, for example `iconv -f utf-16 "),
    (
        GOOD | {"prompt": [{"role": "user", "content": 5}]},
        r"prompt\[0\].content must be text or a list of parts, found 5",
    ),
    (
        GOOD | {"prompt": [{"role": "user", "content": ["Where?"]}]},
        r"prompt\[0\].content\[0\] must be .*found 'Where",
    ),
    (
        GOOD | {"prompt": [{"role": "user", "content": [{"type": "image", "image": {"bytes": "x"}}]}]},
        r"prompt\[0\].content\[0\].image must be a path or a data: URL, found {",
    ),
    *(
        (GOOD | {"prompt": [{"role": "user", "content": [part]}]}, r"prompt\[0\].content\[0\] must have a text")
        for part in ({"type": "text", "text": None}, {"type": "text", "text": 5}, {"type": "input_audio"}, {"x": "y"})
    ),
    (
        GOOD | {"prompt": [{"role": "assistant", "content": "I look.", "function_call": {"name": "look"}}]},
        r"prompt\[0\].function_call is not read",
    ),
    (
        GOOD | {"prompt": [{"role": "assistant", "tool_calls": [call("{")]}]},
        r"prompt\[0\].tool_calls\[0\].function.arguments is not valid JSON",
    ),
    (
        GOOD | {"prompt": [{"role": "assistant", "tool_calls": [call("[1]")]}]},
        r"prompt\[0\].tool_calls\[0\].function.arguments must be an object, found \[1\]",
    ),
    (GOOD | {"prompt": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, r"prompt\[0\].tool_calls\[0\] must be"),
    (GOOD | {"reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing"),
    (GOOD | {"data_source": None}, "data_source must be a name, found None"),
    (GOOD | {"agent_name": 3}, "agent_name must be text, found 3"),
    (GOOD | {"extra_info": "x"}, "extra_info must be a mapping"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, bad: object, message: str) -> None:
    path = write(tmp_path / "data.jsonl", [GOOD, bad])
    with pytest.raises(DataError, match=f"data.jsonl, row 2: {message}"):
        load_rows(path)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        load_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        load_rows(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match=r"unknown kind '\.csv'"):
        load_rows(write(tmp_path / "data.csv", [GOOD]))
    with pytest.raises(DataError, match="column 'prompt' is missing; found data_source, reward_model"):
        load_rows(write(tmp_path / "a.parquet", [{k: GOOD[k] for k in ("data_source", "reward_model")}]))
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not readable as Parquet"):
        load_rows(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"row 1: extra_info\.when: date is not plain data"):
        load_rows(write(tmp_path / "c.parquet", [GOOD | {"when": datetime.date(2026, 1, 1)}]))


def test_shards_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    for number in (1, 0):
        write(tmp_path / f"train-{number:05d}-of-00002.parquet", [truth(f"{number}{row}") for row in range(2)])
    (tmp_path / "README.md").write_text("not a shard")
    assert [row.ground_truth for row in load_rows(tmp_path)] == ["00", "01", "10", "11"]
    assert len(load_rows(tmp_path, limit=3)) == 3
    write(tmp_path / "train-00001-of-00002.parquet", [GOOD, truth("\u2028") | {"data_source": ""}])
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet, row 2: data_source"):
        load_rows(tmp_path)
    write(tmp_path / "test-00000-of-00001.parquet", [GOOD])
    with pytest.raises(DataError, match="holds files of test and train: give one of them a separate folder"):
        load_rows(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"a folder without \.parquet, \.jsonl or \.ndjson files"):
        load_rows(tmp_path / "none")
    for number, suffix in enumerate((".jsonl", ".parquet")):
        folder = tmp_path / "none" / f"{number}"
        (folder / f"part-1{suffix}").mkdir(parents=True)
        with pytest.raises(DataError, match=rf"part-1\{suffix} .*(directory|not a regular file)"):
            load_rows(folder)


def test_text_of_parquet_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([GOOD] * 3)
    names = pyarrow.array([b"a", b"a", "é".encode("latin-1")]).view(pyarrow.string())
    table = table.set_column(table.schema.get_field_index("data_source"), "data_source", names)
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data\.parquet, row 3: data_source has no plain value \(.*utf-8"):
        load_rows(tmp_path / "data.parquet")


def test_the_stream_is_an_order_of_all_rows_each_epoch_and_the_same_again() -> None:
    stream = DataStream(10, seed=3, shuffle=True)
    places = stream.places(DataCursor(), 30)
    assert places == [DataCursor(epoch, index) for epoch in range(3) for index in range(10)]
    order = [stream.row_index(place) for place in places]
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [DataStream(10, seed=3, shuffle=True).row_index(places[n]) for n in (25, 3, 14)] == [
        order[n] for n in (25, 3, 14)
    ]
    plain = DataStream(4, seed=3, shuffle=False)
    assert [plain.row_index(place) for place in plain.places(DataCursor(), 6)] == [0, 1, 2, 3, 0, 1]


def test_a_changed_dataset_goes_on_within_the_epoch_or_with_the_next_one() -> None:
    stopped = DataStream(10, seed=3, shuffle=True).after(DataCursor(2, 6))
    assert stopped == DataCursor(2, 7)
    shrunk, grown = DataStream(5, seed=3, shuffle=True), DataStream(9, seed=3, shuffle=True)
    assert shrunk.places(stopped, 7) == [DataCursor(3, n) for n in range(5)] + [DataCursor(4, 0), DataCursor(4, 1)]
    assert grown.places(stopped, 3) == [DataCursor(2, 7), DataCursor(2, 8), DataCursor(3, 0)]
    assert {shrunk.row_index(place) for place in shrunk.places(stopped, 5)} == set(range(5))


def test_the_place_after_the_last_row_is_the_next_epochs_first() -> None:
    stream = DataStream(3, seed=0, shuffle=False)
    assert [stream.after(DataCursor(0, n)) for n in range(3)] == [DataCursor(0, 1), DataCursor(0, 2), DataCursor(1, 0)]
    assert stream.places(DataCursor(), 0) == []
