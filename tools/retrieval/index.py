"""BM25 index on disk, by tantivy: built once with bounded memory, memory-mapped by every process that opens it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.tools.retrieval.corpus import Hit, Passage, read_passages
from penstock.tools.retrieval.folder import IndexFailed, ensure_built

KIND = "bm25-1"
"""With the number of schema and analyzer: an index of another one is built anew."""
_WORD = re.compile(r"\w+")

INSTALL = "the retrieval server needs tantivy: `pip install 'penstock[search]'`"


class RetrievalIndex:
    """BM25. Open for searching, from any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises `IndexFailed`."""
        self._index = _tantivy().Index.open(str(folder))
        self._searcher = self._index.searcher()

    def __len__(self) -> int:
        """Passages."""
        return int(self._searcher.num_docs)

    def search(self, query: str, topk: int) -> list[Hit]:
        """At most `topk` passages that share a word with `query`, best first."""
        # Words in lower case alone are never read as the parser's syntax (AND, quotes, fields, ranges).
        words = _WORD.findall(query.lower())[:256]
        if not words:
            return []
        parsed = self._index.parse_query(" ".join(words), ["contents"])
        # Further ones, to put equal scores in the order of their ids: the build's threads put them in any.
        matches = self._searcher.search(parsed, topk + 20, count=False).hits
        hits = [Hit(self._passage(address), score) for score, address in matches]
        return sorted(hits, key=lambda hit: (-hit.score, hit.passage.id))[:topk]

    def search_all(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self.search(query, topk) for query in queries]

    def _passage(self, address: Any) -> Passage:
        (stored,) = self._searcher.doc(address).to_dict()["passage"]
        return Passage(*json.loads(bytes(stored)))


def open_or_build(
    corpus: Path, folder: Path | None = None, on_progress: Callable[[int], None] = lambda _: None
) -> RetrievalIndex:
    """The index of `corpus`, in `folder` (default: ``CORPUS.index`` next to it); built if it is missing or outdated.

    Args:
        on_progress: called with the bytes of the corpus indexed so far.

    Raises:
        BadCorpus: the file is missing, empty, or a line is not a passage.
        IndexFailed: no disk space, no right to write, or tantivy is missing.
    """
    folder = folder or corpus.with_name(f"{corpus.name}.index")
    ensure_built(corpus, folder, KIND, lambda building: _write(corpus, building, on_progress))
    return RetrievalIndex(folder)


def _write(corpus: Path, building: Path, on_progress: Callable[[int], None]) -> int:
    tantivy = _tantivy()
    builder = tantivy.SchemaBuilder()
    builder.add_bytes_field("passage", stored=True, indexed=False)
    schema = builder.add_text_field("contents", tokenizer_name="en_stem", index_option="freq").build()
    writer = tantivy.Index(schema, path=str(building)).writer(heap_size=256 << 20)
    count = 0
    for passage in read_passages(corpus, on_progress):
        stored = json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False).encode("utf-8", "replace")
        writer.add_document(tantivy.Document(passage=stored, contents=passage.contents))
        count += 1
    writer.commit()
    writer.wait_merging_threads()
    return count


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise IndexFailed(INSTALL) from error
    return tantivy
