"""Search-R1's data as Parquet with verl's columns, and the corpus that is searched.

    python recipes/search_r1/data.py small --out data/search-r1         questions about the corpus in this folder
    python recipes/search_r1/data.py nq_hotpotqa --out data/nq-hotpotqa NQ and HotpotQA as Search-R1 has them
    python recipes/search_r1/data.py wiki18 --out data/wiki18           21 million passages of Wikipedia (2018)
    penstock search-server --corpus data/wiki18/wiki-18.jsonl           builds its index at the first start

The last two are fetched from the hub; `--input` takes a file (nq_hotpotqa: a folder with train.parquet and
test.parquet) that was fetched before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from penstock.datasets import NoDataset, Row, dataset_file, field, parquet_rows, write_parquet

CORPUS = Path(__file__).with_name("corpus")
SYSTEM = (
    "Answer the question. Search with the tool `search` as often as you need: it returns passages. When you know, "
    "write the answer alone, as few words as possible, between <answer> and </answer>."
)
QUESTIONS = "PeterJinGo/nq_hotpotqa_train"
WIKI18 = ("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz")
COPY_BYTES = 16 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    try:
        for path, count in KINDS[options.kind](options.out, options.input).items():
            print(f"{path}: {count}")
    except NoDataset as error:
        sys.exit(str(error))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--input", type=Path, help="what was fetched before")
    return parser.parse_args(arguments)


def small(out: Path, _: Path | None) -> dict[Path, str]:
    """The questions of this folder; every fifth one is for evaluation."""
    lines = (CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [small_row(json.loads(line), index) for index, line in enumerate(lines)]
    splits = {"train": [row for row in rows if not held_out(row)], "eval": [row for row in rows if held_out(row)]}
    return {path: save(path, split) for name, split in splits.items() for path in [out / f"{name}.parquet"]}


def held_out(row: Row) -> bool:
    return bool(row["extra_info"]["index"] % 5 == 4)


def small_row(entry: Mapping[str, Any], index: int) -> Row:
    """`articles`: titles of the passages that hold the answer, in the order in which one finds them."""
    split = "eval" if index % 5 == 4 else "train"
    return row(entry["question"], entry["answers"], "searchR1_small", split, index, articles=entry["articles"])


def nq_hotpotqa(out: Path, folder: Path | None) -> dict[Path, str]:
    """169,615 training questions; the test split has seven sources."""
    written = {}
    for split in ("train", "test"):
        name = f"{split}.parquet"
        source = dataset_file(QUESTIONS, name, folder / name if folder else None)
        rows = list(search_r1_rows(source, split))
        written[out / name] = save(out / name, rows)
    return written


def search_r1_rows(source: Path, split: str) -> Iterator[Row]:
    for number, entry in enumerate(parquet_rows(source), start=1):
        answers = field(entry, "reward_model", source, number)["ground_truth"]["target"]
        name = f"searchR1_{field(entry, 'data_source', source, number)}"
        yield row(str(field(entry, "question", source, number)), list(answers), name, split, number - 1)


def wiki18(out: Path, archive: Path | None) -> dict[Path, str]:
    """Unpacked once; 14 GB. The published file is a tar archive, whatever its name says."""
    path = out / "wiki-18.jsonl"
    source = dataset_file(*WIKI18, archive)
    out.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as unpacked:
        unpack(source, unpacked)
    partial.replace(path)
    return {path: f"{path.stat().st_size / 1e9:.1f} GB"}


def unpack(source: Path, into: IO[bytes]) -> None:
    """A gzipped file, or the first file of a gzipped tar archive. Raises `NoDataset` where it is neither."""
    try:
        with tarfile.open(source, "r|gz") as archive:
            for member in archive:
                if (inside := archive.extractfile(member)) is not None:
                    shutil.copyfileobj(inside, into, COPY_BYTES)
                    return
    except tarfile.ReadError:
        into.seek(0)
    try:
        with gzip.open(source) as lines:
            shutil.copyfileobj(lines, into, COPY_BYTES)
    except (OSError, EOFError) as error:
        raise NoDataset(f"{source}: no gzipped corpus: {error}") from error


def row(question: str, answers: Sequence[str], source: str, split: str, index: int, **extra: Any) -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(answers)}},
        "extra_info": {"split": split, "index": index, "question": question, **extra},
    }


def save(path: Path, rows: list[Row]) -> str:
    write_parquet(rows, path)
    return f"{len(rows)} rows"


KINDS = {"small": small, "nq_hotpotqa": nq_hotpotqa, "wiki18": wiki18}

if __name__ == "__main__":
    main()
