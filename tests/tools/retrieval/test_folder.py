"""The folder of an index, whatever is in it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.tools.retrieval.folder import ensure_built


def test_index_folder_is_built_once_by_two_processes(tmp_path: Path) -> None:
    corpus, folder = tmp_path / "corpus", tmp_path / "index"
    corpus.write_text("text")
    begun, may_end, builds = threading.Event(), threading.Event(), []

    def write(building: Path) -> int:
        (building / "first half").write_text("1")
        builds.append(building)
        begun.set()
        assert may_end.wait(20)
        (building / "second half").write_text("2")
        return 1

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ensure_built, corpus, folder, "kind", write)
        assert begun.wait(20)
        second = threads.submit(ensure_built, corpus, folder, "kind", write)
        assert not second.done()
        may_end.set()
        first.result(20)
        second.result(20)
    assert len(builds) == 1
    assert {path.name for path in folder.iterdir()} == {"first half", "second half", "penstock.json"}
