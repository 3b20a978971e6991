"""BM25 index on disk, by tantivy: built once with bounded memory, memory-mapped by every process that opens it.

INDEX.building/  ──commit, merge, manifest──►  INDEX/      a killed build leaves no INDEX, the next one starts over
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.tools.retrieval.corpus import BadCorpus, Passage, read_passages

MANIFEST = "penstock.json"
FORMAT = 1
"""Of schema and analyzer: an index of another format is built anew."""
WRITER_BYTES = 256 << 20
"""What the build keeps in memory before it writes a part out."""
MAX_QUERY_WORDS = 256
TIES = 20
"""Further passages looked at, to put equal scores in the order of their ids: the build's threads put them in any."""
_WORD = re.compile(r"\w+")

INSTALL = "the retrieval server needs tantivy: `pip install 'penstock[search]'`"


class IndexFailed(RuntimeError):
    """The index cannot be made or opened; the text names the mend."""


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float
    """BM25 (k1 1.2, b 0.75) over title and text, English stems; higher is better."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    """What the index was made of: where this is still so, it is used as it is."""

    format: int
    corpus_bytes: int
    corpus_mtime_ns: int

    @classmethod
    def of(cls, corpus: Path) -> _Manifest:
        stat = corpus.stat()
        return cls(FORMAT, stat.st_size, stat.st_mtime_ns)


class RetrievalIndex:
    """Open for searching, from any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises `IndexFailed`."""
        self._index = _tantivy().Index.open(str(folder))
        self._searcher = self._index.searcher()

    def __len__(self) -> int:
        """Passages."""
        return int(self._searcher.num_docs)

    def search(self, query: str, topk: int) -> list[Hit]:
        """At most `topk` passages that share a word with `query`, best first."""
        # Words in lower case alone are never taken for the parser's own syntax (AND, quotes, fields, ranges).
        words = _WORD.findall(query.lower())[:MAX_QUERY_WORDS]
        if not words:
            return []
        parsed = self._index.parse_query(" ".join(words), ["contents"])
        found = self._searcher.search(parsed, topk + TIES, count=False).hits
        hits = [Hit(self._passage(address), score) for score, address in found]
        return sorted(hits, key=lambda hit: (-hit.score, hit.passage.id))[:topk]

    def search_all(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self.search(query, topk) for query in queries]

    def _passage(self, address: Any) -> Passage:
        (stored,) = self._searcher.doc(address).to_dict()["passage"]
        return Passage(*json.loads(bytes(stored)))


def open_or_build(
    corpus: Path, folder: Path | None = None, on_progress: Callable[[int], None] = lambda _: None
) -> RetrievalIndex:
    """The index of `corpus`, in `folder` (default: ``CORPUS.index`` beside it); built where it is missing or outdated.

    Args:
        on_progress: told how many bytes of the corpus are indexed, while it is built.

    Raises:
        BadCorpus: the file is missing, empty, or a line is no passage.
        IndexFailed: no disk space, no right to write, or tantivy is missing.
    """
    if not corpus.is_file():
        raise BadCorpus(f"{corpus}: no such file")
    folder = folder or corpus.with_name(f"{corpus.name}.index")
    manifest = _Manifest.of(corpus)
    if _manifest_in(folder) != manifest:
        try:
            _build(corpus, folder, manifest, on_progress)
        except OSError as error:
            raise IndexFailed(f"{folder}: the index cannot be written: {error}") from error
    return RetrievalIndex(folder)


def _manifest_in(folder: Path) -> _Manifest | None:
    try:
        return _Manifest(**json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _build(corpus: Path, folder: Path, manifest: _Manifest, on_progress: Callable[[int], None]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    if _write(corpus, building, on_progress) == 0:
        shutil.rmtree(building)
        raise BadCorpus(f"{corpus}: holds no passage")
    (building / MANIFEST).write_text(json.dumps(asdict(manifest)))
    _replace(folder, building)


def _write(corpus: Path, building: Path, on_progress: Callable[[int], None]) -> int:
    tantivy = _tantivy()
    writer = tantivy.Index(_schema(), path=str(building)).writer(heap_size=WRITER_BYTES)
    count = 0
    for passage in read_passages(corpus, on_progress):
        stored = json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False).encode("utf-8", "replace")
        writer.add_document(tantivy.Document(passage=stored, contents=passage.contents))
        count += 1
    writer.commit()
    writer.wait_merging_threads()
    return count


def _replace(folder: Path, building: Path) -> None:
    """Only what an earlier build made is removed, never a folder that holds something else."""
    if folder.exists():
        if not (folder / MANIFEST).is_file() and any(folder.iterdir()):
            raise IndexFailed(f"{folder} exists and is no index of ours; choose another folder")
        shutil.rmtree(folder)
    building.rename(folder)


def _schema() -> Any:
    builder = _tantivy().SchemaBuilder()
    builder.add_bytes_field("passage", stored=True, indexed=False)
    return builder.add_text_field("contents", tokenizer_name="en_stem", index_option="freq").build()


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise IndexFailed(INSTALL) from error
    return tantivy
