"""Search-R1's data as Parquet with verl's columns, and the corpus that is searched.

    python -m penstock.recipes.search_r1.data small --out data/search-r1          # questions about corpus/
    python -m penstock.recipes.search_r1.data two_hops --out data/two-hops        # for learn.yaml
    python -m penstock.recipes.search_r1.data nq_hotpotqa --out data/nq-hotpotqa  # as Search-R1 has them
    python -m penstock.recipes.search_r1.data wiki18 --out data/wiki18            # 21 million passages
    penstock search-server --corpus data/wiki18/wiki-18.jsonl                     # builds its index at the first start

The last two are fetched from the hub; `--input` takes a file (nq_hotpotqa: a folder with train.parquet and
test.parquet) that was fetched before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO, Any

from penstock.datasets import NoDataset, Row, dataset_file, field, parquet_rows, write_parquet

CORPUS = Path(__file__).with_name("corpus")
SYSTEM = (
    "Answer the question. Search with the tool `search` as often as you need: it returns passages. When you know, "
    "write the answer alone, as few words as possible, between <answer> and </answer>."
)
QUESTIONS = "PeterJinGo/nq_hotpotqa_train"
COPY_BYTES = 16 << 20
ONE_SEARCH = 0.55
"""Share of the cold start's conversations that stop after the first search."""
GIVES_UP = "I do not know"
Message = Mapping[str, Any]


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
    return save_splits([small_row(json.loads(line), index) for index, line in enumerate(lines)], out)


def split_of(index: int) -> str:
    return "eval" if index % 5 == 4 else "train"


def save_splits(rows: Sequence[Row], out: Path) -> dict[Path, str]:
    splits = {name: [row for row in rows if row["extra_info"]["split"] == name] for name in ("train", "eval")}
    return {path: save(path, split) for name, split in splits.items() for path in [out / f"{name}.parquet"]}


def small_row(entry: Mapping[str, Any], index: int) -> Row:
    """`articles`: titles of the passages that hold the answer, in the order in which one finds them."""
    source, articles = "searchR1_small", entry["articles"]
    return row(entry["question"], entry["answers"], source, split_of(index), index, articles=articles)


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
    source = dataset_file("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", archive)
    out.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as unpacked:
        unpack(source, unpacked)
    partial.replace(path)
    return {path: f"{path.stat().st_size / 1e9:.1f} GB"}


def unpack(source: Path, into: IO[bytes]) -> None:
    """A gzipped file, or the first file of a gzipped tar archive. Raises `NoDataset` if it is neither."""
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


# two hops -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that an article of the corpus states of its subject."""

    article: str
    relation: str
    value: str
    """The value as the article writes it. If it is the title of another article, a question may continue from it."""
    phrase: str = ""
    """The value, described without its name: the part of a question that the first search finds out. Empty: none."""
    mention: str = ""
    """The subject as `phrase` writes it, and as one searches for it."""


def two_hops(out: Path, _: Path | None) -> dict[Path, str]:
    """Questions that need two searches, every fifth one for evaluation, and conversations for the cold start."""
    facts = corpus_facts()
    written = save_splits([two_hop_row(*pair, index) for index, pair in enumerate(chains(facts))], out)
    invent = Inventor(facts, Random(0))
    lines = [json.dumps({"messages": invent.conversation()}, ensure_ascii=False) for _ in range(3000)]
    path = out / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {**written, path: f"{len(lines)} conversations"}


def corpus_facts() -> list[Fact]:
    lines = (CORPUS / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Fact(**json.loads(line)) for line in lines]


def corpus_texts() -> dict[str, str]:
    lines = (CORPUS / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["title"]: entry["text"] for entry in map(json.loads, lines)}


def by_article(facts: Sequence[Fact]) -> dict[str, list[Fact]]:
    articles: dict[str, list[Fact]] = {}
    for fact in facts:
        articles.setdefault(fact.article, []).append(fact)
    return articles


def chains(facts: Sequence[Fact]) -> list[tuple[Fact, Fact]]:
    """(first, second): the second fact is of the article that the first one's value names."""
    articles = by_article(facts)
    return [(first, second) for first in facts if first.phrase for second in articles[first.value]]


def two_hop_question(first: Fact, second: Fact) -> str:
    # Relation of the second fact → question that its search answers.
    questions = {
        "land": "In which country or state lies {}?",
        "water": "On which river or firth lies {}?",
        "capital": "What is the capital of {}?",
        "birthplace": "Where was {} born?",
    }
    return questions[second.relation].format(first.phrase)


def two_hop_row(first: Fact, second: Fact, index: int) -> Row:
    """Without a system prompt: each token of the context counts for a model that small."""
    question, articles = two_hop_question(first, second), [first.article, second.article]
    plain = row(question, [second.value], "searchR1_two_hops", split_of(index), index, articles=articles)
    return {**plain, "prompt": [{"role": "user", "content": question}]}


class Inventor:
    """Conversations about the corpus's articles with other facts in them, so that nothing can be learned by heart.

    The first article leads to an article drawn anew, and that one has drawn values: the second query stands in the
    first result alone, and the answer in the second one alone.
    """

    def __init__(self, facts: Sequence[Fact], dice: Random) -> None:
        self._facts, self._facts_by_article, self._texts, self._dice = facts, by_article(facts), corpus_texts(), dice
        self._chains = chains(facts)

    def conversation(self) -> list[Message]:
        first, last = self._dice.choice(self._chains)
        second = self._dice.choice(self._of(last.relation))
        invented = {
            fact.value: self._dice.choice(self._of(fact.relation)).value
            for fact in self._facts_by_article[second.article]
        }
        result = passage(first.article, retold(self._texts[first.article], {first.value: second.article}))
        begun = [
            {"role": "user", "content": two_hop_question(first, last)},
            call(first.mention),
            {"role": "tool", "content": result},
        ]
        if self._dice.random() < ONE_SEARCH:
            return [*begun, answer(GIVES_UP)]
        result = passage(second.article, retold(self._texts[second.article], invented))
        return [*begun, call(second.article), {"role": "tool", "content": result}, answer(invented[second.value])]

    def _of(self, relation: str) -> list[Fact]:
        return [fact for fact in self._facts if fact.relation == relation]


def retold(text: str, values: Mapping[str, str]) -> str:
    """`text` with other names in it; longer ones go before those that they contain."""
    names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda found: values[found[0]], text)


def passage(title: str, text: str) -> str:
    """Writes a passage as the tool `search` does if it finds only one."""
    return f"Doc 1 (Title: {title}) {text}"


def call(query: str) -> Message:
    function = {"name": "search", "arguments": {"query": query}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": f"<answer>{text}</answer>"}


# rows ---------------------------------------------------------------------------------------------------------------
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


KINDS = {"small": small, "two_hops": two_hops, "nq_hotpotqa": nq_hotpotqa, "wiki18": wiki18}

if __name__ == "__main__":
    main()
