"""Files of public datasets: a local copy, or the Hugging Face hub if it is reachable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.common import parquet


class NoDataset(Exception):
    """The dataset cannot be had or is another one; the message says what to do."""


def dataset_file(repository: str, name: str, local: Path | None = None) -> Path:
    """`local` if it is given, else file `name` of the hub's dataset `repository`, downloaded once and kept.

    Raises `NoDataset`.
    """
    if local is not None:
        if not local.is_file():
            raise NoDataset(f"{local}: no such file")
        return local
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset"))
    except (OSError, HfHubHTTPError) as error:
        raise NoDataset(
            f"{name} of https://huggingface.co/datasets/{repository} cannot be fetched "
            f"({type(error).__name__}: {error}); "
            "where the hub is not reachable, fetch it elsewhere and give it with --input"
        ) from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Raises `NoDataset` where the file cannot be read."""
    try:
        yield from parquet.parquet_rows(path)
    except parquet.BadParquet as error:
        raise NoDataset(str(error)) from error


def field(row: dict[str, Any], name: str, path: Path, number: int) -> Any:
    """A column that must be there. Raises `NoDataset` naming file, row (from 1) and column."""
    if row.get(name) is None:
        raise NoDataset(f"{path}, row {number}: no {name!r}; it has {', '.join(sorted(row))}")
    return row[name]
