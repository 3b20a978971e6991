from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("tantivy")

from penstock.tools.retrieval import BadCorpus, IndexFailed, open_or_build
from penstock.tools.retrieval.index import RetrievalIndex

ROWS = [
    {"id": "fr", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "de", "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": 7, "contents": '"Penstock"\nA gated pipe that feeds a turbine.'},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", ROWS)


def ids(index: RetrievalIndex, query: str, topk: int = 3) -> list[str]:
    return [hit.passage.id for hit in index.search(query, topk)]


def test_index_ranks_whole_passages_and_matches_stems(corpus: Path) -> None:
    index = open_or_build(corpus)
    assert len(index) == 3
    hits = index.search("capitals of Germany", 3)
    assert [hit.passage.id for hit in hits] == ["de", "fr"]
    assert hits[0].score > hits[1].score > 0
    assert hits[0].passage.to_document() == {
        "id": "de",
        "title": "Berlin",
        "text": "Berlin is the capital of Germany.",
        "contents": '"Berlin"\nBerlin is the capital of Germany.',
    }
    assert ids(index, "turbines") == ["7"]
    assert ids(index, "capital", topk=1) == ["de"], "equal scores come by id"


@pytest.mark.parametrize(
    "query", ["", "  ", "?!", "AND OR NOT", 'title:"x', "[a TO", "((", "contents:*", "a^9 ~2", "\0", "😀"]
)
def test_index_query_is_words_never_syntax(corpus: Path, query: str) -> None:
    assert ids(open_or_build(corpus), query) in ([], ["7"])


def test_index_index_is_built_once_until_the_corpus_changes(corpus: Path) -> None:
    progress: list[int] = []
    open_or_build(corpus, on_progress=progress.append)
    assert progress[-1] == corpus.stat().st_size
    progress.clear()
    open_or_build(corpus, on_progress=progress.append)
    assert progress == []
    write(corpus, [*ROWS, {"id": "it", "title": "Rome", "text": "Rome."}])
    assert ids(open_or_build(corpus, on_progress=progress.append), "rome") == ["it"]
    assert progress


def test_index_killed_build_leaves_no_index_and_next_starts_over(corpus: Path) -> None:
    def die(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_build(corpus, on_progress=die)
    folder = corpus.with_name("corpus.jsonl.index")
    assert not folder.exists()
    assert len(open_or_build(corpus)) == 3
    found = {path.name: path for path in corpus.parent.iterdir()}
    assert sorted(found) == ["corpus.jsonl", "corpus.jsonl.index", "corpus.jsonl.index.lock"]
    assert found["corpus.jsonl.index.lock"].stat().st_size == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"corpus.jsonl:2: not JSON"),
        ("[1]", r":2: an object is needed, not list"),
        ('{"id": 1, "body": "x"}', r":2: needs a string `text` \(or `contents`\); it has: id, body"),
        ('{"text": "x", "title": 3}', r":2: `title` must be a string, not int"),
    ],
)
def test_index_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(BadCorpus, match=message):
        open_or_build(path)


def test_index_refuses_missing_corpora_and_foreign_folders(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(BadCorpus, match="no such file"):
        open_or_build(tmp_path / "nowhere.jsonl")
    with pytest.raises(BadCorpus, match="holds no passage"):
        open_or_build(write(tmp_path / "empty.jsonl", []))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(IndexFailed, match="is not an index of ours"):
        open_or_build(corpus, mine)
    assert os.listdir(mine) == ["thesis.tex"]
