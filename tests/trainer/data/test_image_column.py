"""The column `images` as verl and EasyR1 have it: pictures in their places, and rows that cannot be used by name."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tests.vision_model import png

from penstock.trainer import DataError, load_rows

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'penstock[vision]'")
RED, BLUE = png((200, 30, 30)), png((20, 20, 220))
URL = {data: f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (RED, BLUE)}


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": messages, "data_source": "d", "reward_model": {"ground_truth": "red"}, **columns}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def image(where: str) -> dict[str, str]:
    return {"type": "image", "image": where}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_bytes_of_parquet_stand_where_their_marks_stood(tmp_path: Path) -> None:
    """Hugging Face's form; the path beside bytes is a name only. Rows without marks stay as they are."""
    pictures = [{"bytes": RED, "path": "a.png"}, {"bytes": BLUE, "path": None}]
    conversation = [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image> or <image>?"}]
    rows = [row(conversation, images=pictures, level=3), row("No picture.", images=[])]
    first, second = load_rows(write(tmp_path / "d.parquet", rows))
    content = [image(URL[RED]), text(" or "), image(URL[BLUE]), text("?")]
    assert list(first.messages) == [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    assert first.extra_info == {"level": 3}
    assert list(second.messages) == [{"role": "user", "content": "No picture."}]


def test_paths_are_relative_to_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(RED)
    whole = str(tmp_path / "pictures" / "a.png")
    given = ["pictures/a.png", whole, f"file://{whole}", {"path": "pictures/a.png"}, URL[BLUE]]
    (made,) = load_rows(write(tmp_path / "d.jsonl", [row("<image>" * 5, images=given)]))
    assert made.messages[0]["content"] == [*[image(whole)] * 4, image(URL[BLUE])]


def test_parts_take_pictures_in_order(tmp_path: Path) -> None:
    """Content in parts, of which some name theirs."""
    parts = [{"type": "image"}, text("and <image>"), image(URL[RED])]
    (made,) = load_rows(
        write(tmp_path / "d.jsonl", [row([{"role": "user", "content": parts}], images=[*URL.values()])])
    )
    assert made.messages[0]["content"] == [image(URL[RED]), text("and "), image(URL[BLUE]), image(URL[RED])]


def test_marks_without_a_column_are_text(tmp_path: Path) -> None:
    (made,) = load_rows(write(tmp_path / "d.jsonl", [row("What does <image> mean?")]))
    assert made.messages[0]["content"] == "What does <image> mean?"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"images": [URL[RED]] * 2}, r"the prompt has 1 places for pictures \(<image>\), images has 2"),
        ({"images": []}, "the prompt has 1 places for pictures .*, images has 0"),
        ({"images": "a.png"}, "images must be a list of pictures, found str"),
        ({"images": [3]}, r"images\[0\] must be .*, found int"),
        ({"images": [{"path": None}]}, r"images\[0\] has neither bytes nor a path"),
        ({"images": ["none.png"]}, r"images\[0\]: .*none.png is not a file"),
        ({"videos": ["a.mp4"]}, "column 'videos' has some"),
    ],
)
def test_pictures_that_cannot_be_used_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"d.jsonl, row 1: {message}"):
        load_rows(write(tmp_path / "d.jsonl", [row("<image>?", **columns)]))


def test_bytes_that_are_no_picture_are_named(tmp_path: Path) -> None:
    rows = [row("<image>?", images=[{"bytes": b"none", "path": None}])]
    with pytest.raises(DataError, match=r"row 1: images\[0\]: its 4 bytes are no picture"):
        load_rows(write(tmp_path / "d.parquet", rows))
