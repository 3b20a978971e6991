"""`penstock data swe-bench|swe-gym|r2e`: rows of a published dataset, each with the place of its repository."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.datasets.swe.r2e import r2e_task
from penstock.datasets.swe.rows import BadFile, BadRow, Fields, Raw, raw_rows, write_split
from penstock.datasets.swe.store import TreeStore
from penstock.datasets.swe.swe_bench import SWE_BENCH, SWE_GYM, Kind, swe_bench_task
from penstock.sandbox.swe import SweTask, SweTaskError

Format = Literal["swe-bench", "swe-gym", "r2e"]
IMAGE = "penstock-swe:{id}"
"""Made from the published image by recipes/swe/build-images: without its history, without its hidden tests."""


@dataclass(frozen=True)
class Places:
    """The sources of repositories for the boxes: images (backend docker), or clones of this machine (any backend)."""

    image: str = IMAGE
    repositories: Path | None = None
    """Folder with a clone per repository, ``owner__name``; its commits are read, nothing of it is changed."""
    test_command: str = ""
    """Instead of the dataset's own, which runs the Python of its image."""


@dataclass(frozen=True)
class ConversionReport:
    written: int
    refused: list[str]
    """``where: why``, a line per row that no task can be made of."""
    reasons: Counter[str] = field(default_factory=Counter)


def convert(kind: Format, source: Path, out: Path, places: Places, split: str = "train") -> ConversionReport:
    """Write ``SPLIT.parquet``, ``SPLIT.jsonl`` and, with images, ``images.tsv`` (name, made from).

    A row that cannot be converted is left out and reported; where none can, nothing is written. Raises `BadFile`.
    """
    tasks: list[Fields] = []
    images: list[tuple[str, str]] = []
    refused: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        read = _reader(kind, Path(folder))
        for where, raw in raw_rows(source):
            try:
                fields, published = read(raw)
                fields = _placed(fields, places)
                SweTask.from_row(fields, out)
            except (BadRow, SweTaskError) as error:
                refused.append(f"{where}: {error}")
                continue
            tasks.append(fields)
            images.append((str(fields.get("sandbox_image") or ""), published))
    if not tasks:
        raise BadFile("\n".join(["no row could be converted:", *(refused[:5] or [f"{source} is empty"])]))
    write_split(tasks, out, split)
    if places.repositories is None:
        (out / "images.tsv").write_text("".join(f"{ours}\t{theirs}\n" for ours, theirs in images))
    return ConversionReport(len(tasks), refused, Counter(line.partition(": ")[2][:60] for line in refused))


def _reader(kind: Format, scratch: Path) -> Callable[[Raw], tuple[Fields, str]]:
    """(task, published image) of a row."""
    if kind == "r2e":
        store = TreeStore(scratch / "scratch.git")

        def r2e(row: Raw) -> tuple[Fields, str]:
            fields = r2e_task(row, store)
            return fields, str(fields["docker_image"])

        return r2e
    dataset: Kind = SWE_BENCH if kind == "swe-bench" else SWE_GYM

    def swe_bench(row: Raw) -> tuple[Fields, str]:
        fields = swe_bench_task(row, dataset)
        return fields, dataset.published(str(fields["instance_id"]))

    return swe_bench


def _placed(fields: Fields, places: Places) -> Fields:
    command = {"test_command": places.test_command} if places.test_command else {}
    if places.repositories is None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", str(fields["instance_id"]))
        row = {**fields, "sandbox_image": places.image.format(id=name), "image_folder": "/testbed", **command}
        row.pop("base_commit", None)  # the image has its files
        return row
    if "base_commit" not in fields:
        raise BadRow("field 'base_commit' is missing: without it only an image has the repository")
    folder = places.repositories / str(fields["repo"]).replace("/", "__")
    if not folder.is_dir():
        raise BadRow(f"field 'repo': no clone at {folder}")
    return {**fields, "repository": str(folder.absolute()), **command}
