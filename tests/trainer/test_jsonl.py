import json
from pathlib import Path

from penstock.common import JsonlTail, append_jsonl, rewrite_jsonl


def test_each_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    append_jsonl(path, [{"step": 0}])
    append_jsonl(path, [{"step": 1}])
    assert tail.read() == [{"step": 0}, {"step": 1}]
    assert tail.read() == []
    append_jsonl(path, [{"step": 2}])
    assert tail.read() == [{"step": 2}]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    text = json.dumps({"step": 0}) + "\n"
    path.write_text(text[:4])
    assert tail.read() == []
    path.write_text(text)
    assert tail.read() == [{"step": 0}]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    append_jsonl(path, [{"step": 0}])
    tail.read()
    rewrite_jsonl(path, [{"step": 0, "eval": 1.0}])
    assert tail.read() == [{"step": 0, "eval": 1.0}]
