"""With a real, tiny, untrained encoder: what is tested is the index, not the meaning of its vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.tools.retrieval import IndexFailed, open_or_build_dense
from penstock.tools.retrieval.corpus import Passage
from penstock.tools.retrieval.dense import DenseIndex

DENSE = Path(__file__).parents[3] / ".venv-dense"
pytestmark = [pytest.mark.deep, pytest.mark.torch, pytest.mark.usefixtures("libraries")]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "berlin", "rome", "is", "the", "capital", "of"]
WORDS += ["france", "germany", "italy", "query", "passage", ":", "é"]
ROWS = [
    {"id": "fr", "title": "Paris", "text": "paris is the capital of france"},
    {"id": "de", "title": "Berlin", "text": "berlin is the capital of germany é"},
    {"id": "it", "title": "Rome", "text": "rome is the capital of italy"},
]


@pytest.fixture(scope="module")
def libraries() -> Iterator[None]:
    """They are in no other test's way: see scripts/setup-dense."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(DENSE)])
        for name in ("faiss", "sentence_transformers"):
            pytest.importorskip(name, reason=f"{name} is not there: scripts/setup-dense")
        yield


@pytest.fixture(scope="module")
def encoder(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a sentence-transformers model: a BERT of 2 layers, mean pooling, E5's prompts."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    words = Transformer(str(folder))
    prompts = {"query": "query : ", "document": "passage : "}
    model = SentenceTransformer(modules=[words, Pooling(32)], prompts=prompts)
    model.save(str(folder / "whole"))
    return str(folder / "whole")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", ROWS)


def ids(index: DenseIndex, query: str, topk: int = 3) -> list[str]:
    (hits,) = index.search_all([query], topk)
    return [hit.passage.id for hit in hits]


def test_dense_index_ranks_by_cosine(encoder: str, corpus: Path) -> None:
    from sentence_transformers import SentenceTransformer

    queries = ["capital of france", "rome"]
    found = open_or_build_dense(corpus, encoder).search_all(queries, 2)
    model = SentenceTransformer(encoder)
    passages = [Passage(row["id"], row["title"], row["text"]) for row in ROWS]
    asked = model.encode([f"query : {query}" for query in queries], normalize_embeddings=True)
    held = model.encode([f"passage : {passage.contents}" for passage in passages], normalize_embeddings=True)
    for hits, cosines in zip(found, asked @ held.T, strict=True):
        best = np.argsort(-cosines)[:2]
        assert [hit.passage for hit in hits] == [passages[row] for row in best]
        assert [hit.score for hit in hits] == pytest.approx(cosines[best], abs=1e-5)


def test_dense_index_is_built_once_per_corpus_and_model(
    encoder: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[int] = []
    before = ids(open_or_build_dense(corpus, encoder, on_progress=progress.append), "italy")
    assert progress.pop() == corpus.stat().st_size
    progress.clear()
    assert ids(open_or_build_dense(corpus, encoder, on_progress=progress.append), "italy") == before
    assert progress == []
    other = tmp_path / "other-name"
    other.symlink_to(encoder)
    open_or_build_dense(corpus, str(other), on_progress=progress.append)
    assert progress
    write(corpus, ROWS[:2])
    assert len(open_or_build_dense(corpus, encoder)) == 2


def test_dense_index_spans_batches_and_bounds_topk(encoder: str, tmp_path: Path) -> None:
    rows = [{"id": str(number), "text": " ".join(WORDS[5 + number % 9 :])} for number in range(600)]
    index = open_or_build_dense(write(tmp_path / "many.jsonl", rows), encoder)
    assert len(index) == 600
    found = ids(index, "capital", topk=1000)
    assert sorted(found, key=int) == [row["id"] for row in rows]


def test_dense_index_what_is_no_model_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(IndexFailed, match="nothing is not a sentence-transformers model"):
        open_or_build_dense(corpus, str(tmp_path / "nothing"))
