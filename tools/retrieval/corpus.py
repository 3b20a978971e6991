"""The corpus: JSON lines with `id`, `title` and `text`, or Search-R1's `id` and `contents`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class BadCorpus(ValueError):
    """A line that is not a passage; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as in Search-R1's corpora, whose clients split them: the title in quotes, a line break, the
        text.
        """
        return f'"{self.title}"\n{self.text}'

    def to_document(self) -> dict[str, str]:
        """Return the passage in the server's form."""
        return {"id": self.id, "title": self.title, "text": self.text, "contents": self.contents}


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that answers a query."""

    passage: Passage
    score: float
    """Higher is better: BM25 (k1 1.2, b 0.75), or the product of the dense index's vectors."""


class Index(Protocol):
    """A search index, safe from any thread."""

    def __len__(self) -> int:
        """Passages."""

    def search_all(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` passages for each query, best first."""


def read_passages(path: Path, on_progress: Callable[[int], None] = lambda _: None) -> Iterator[Passage]:
    """Every passage of the file, one line at a time; blank lines are skipped.

    Args:
        on_progress: called from time to time with the bytes read.

    Raises:
        BadCorpus: a line is not a JSON object with the keys above.
    """
    done_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done_bytes += len(line)
            if line.strip():
                yield _to_passage(line, f"{path}:{number}", number)
            if number % 1000 == 0:
                on_progress(done_bytes)
    on_progress(done_bytes)


def _to_passage(line: bytes, where: str, number: int) -> Passage:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadCorpus(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadCorpus(f"{where}: an object is needed, not {type(row).__name__}")
    passage_id = str(row.get("id", number - 1))
    if isinstance(row.get("text"), str):
        title = row.get("title", "")
        if not isinstance(title, str):
            raise BadCorpus(f"{where}: `title` must be a string, not {type(title).__name__}")
        return Passage(passage_id, title, row["text"])
    if isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return Passage(passage_id, title.strip('"'), text)
    raise BadCorpus(f"{where}: needs a string `text` (or `contents`); it has: {', '.join(row) or 'nothing'}")
