"""Dense index on disk: one vector per passage by a sentence-transformers model, exact search by faiss.

    passages.jsonl   the passages, one JSON list a line      offsets.npy   where each line begins
    vectors.faiss    [passages, dimensions] float32, memory-mapped

Queries and passages get the prompts that the model's own configuration names (E5's "query: " and "passage: ").
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tools.retrieval.corpus import Hit, Passage, read_passages
from penstock.tools.retrieval.folder import IndexFailed, ensure_built

KIND = "dense-1"
"""With the number of the format; the model's name follows: vectors of two models have nothing to say to each other."""
INSTALL = "dense retrieval needs sentence-transformers and faiss: `pip install 'penstock[dense]'`"
_PASSAGES, _OFFSETS, _VECTORS = "passages.jsonl", "offsets.npy", "vectors.faiss"


class DenseIndex:
    """Open for searching, from any thread."""

    def __init__(self, folder: Path, model: Any) -> None:
        """`model`: a `SentenceTransformer`. Raises `IndexFailed`."""
        faiss = _faiss()
        self._model = model
        self._one_at_a_time = threading.Lock()  # a model is not made for several threads
        self._vectors = faiss.read_index(str(folder / _VECTORS), faiss.IO_FLAG_MMAP)
        self._offsets = np.load(folder / _OFFSETS)
        with (folder / _PASSAGES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return int(self._vectors.ntotal)

    def search_all(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        with self._one_at_a_time:
            vectors = _unit(self._model.encode_query(list(queries), show_progress_bar=False))  # [queries, dimensions]
        scores, rows = self._vectors.search(vectors, min(topk, len(self)))
        return [
            [Hit(self._passage(row), float(score)) for row, score in zip(of_query, its_scores, strict=True)]
            for of_query, its_scores in zip(rows, scores, strict=True)
        ]

    def _passage(self, row: int) -> Passage:
        return Passage(*json.loads(self._lines[self._offsets[row] : self._offsets[row + 1]]))


def open_or_build_dense(
    corpus: Path, model_name: str, folder: Path | None = None, on_progress: Callable[[int], None] = lambda _: None
) -> DenseIndex:
    """The dense index of `corpus` in `folder` (default: ``CORPUS.dense`` next to it); built where missing or outdated.

    Args:
        model_name: folder or hub name of a sentence-transformers model.
        on_progress: called with the bytes of the corpus encoded so far.

    Raises:
        BadCorpus: the file is missing, empty, or a line is not a passage.
        IndexFailed: the model cannot be loaded, no disk space, or the libraries are missing.
    """
    model = _load(model_name)
    folder = folder or corpus.with_name(f"{corpus.name}.dense")
    kind = f"{KIND} {model_name}"
    ensure_built(corpus, folder, kind, lambda building: _write(corpus, building, model, on_progress))
    return DenseIndex(folder, model)


def _load(model_name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise IndexFailed(INSTALL) from error
    try:
        return SentenceTransformer(model_name)
    except (OSError, ValueError) as error:
        raise IndexFailed(f"{model_name} is not a sentence-transformers model that can be loaded: {error}") from error


def _write(corpus: Path, building: Path, model: Any, on_progress: Callable[[int], None]) -> int:
    faiss = _faiss()
    vectors = faiss.IndexFlatIP(model.get_embedding_dimension())
    offsets = [0]
    with (building / _PASSAGES).open("wb") as lines:
        passages = iter(read_passages(corpus, on_progress))
        while batch := list(islice(passages, 256)):  # the only ones in memory besides the vectors
            for passage in batch:
                line = json.dumps([passage.id, passage.title, passage.text]) + "\n"
                offsets.append(offsets[-1] + lines.write(line.encode("ascii")))
            contents = [passage.contents for passage in batch]
            vectors.add(_unit(model.encode_document(contents, show_progress_bar=False)))
    np.save(building / _OFFSETS, np.asarray(offsets, dtype=np.int64))
    faiss.write_index(vectors, str(building / _VECTORS))
    return int(vectors.ntotal)


def _unit(vectors: Any) -> np.ndarray[Any, Any]:
    """[rows, dimensions] of length one: their products are cosines."""
    vectors = np.asarray(vectors, dtype=np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise IndexFailed(INSTALL) from error
    return faiss
