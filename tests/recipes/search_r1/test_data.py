"""The corpus and its questions, and what the published files become."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import script

from penstock.agent_loops.rewards import normalised
from penstock.tools.retrieval import open_or_build
from penstock.trainer import load_rows

pytestmark = pytest.mark.recipes
data = script("search_r1/data.py")


def questions() -> list[dict[str, Any]]:
    lines = (data.CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def passages_of_corpus() -> list[SimpleNamespace]:
    lines = (data.CORPUS / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [SimpleNamespace(**json.loads(line)) for line in lines]


def test_articles_are_short_and_named_once() -> None:
    passages = passages_of_corpus()
    assert len({one.id for one in passages}) == len({one.title for one in passages}) == len(passages) == 68
    assert all(100 <= len(one.text) <= 400 for one in passages)


def test_every_answer_stands_in_its_last_article() -> None:
    texts = {one.title: normalised(one.text) for one in passages_of_corpus()}
    told = questions()
    assert len({one["question"] for one in told}) == len(told) == 120
    for one in told:
        assert set(one["articles"]) <= set(texts), one
        assert any(normalised(answer) in texts[one["articles"][-1]] for answer in one["answers"]), one
        assert all(normalised(answer) not in normalised(one["question"]).split() for answer in one["answers"]), one


def test_an_article_of_two_names_the_next_one() -> None:
    """Who has read the first knows what to look up second: the title, or what the question itself asks for."""
    texts = {one.title: normalised(one.text) for one in passages_of_corpus()}
    for one in questions():
        for first, second in zip(one["articles"], one["articles"][1:], strict=False):
            last_name = normalised(second).split()[-1]
            assert last_name in texts[first] or last_name in normalised(one["question"]), one


def test_splits_share_no_question(tmp_path: Path) -> None:
    data.main(["small", "--out", str(tmp_path)])
    asked = [
        {row.messages[1]["content"] for row in load_rows(tmp_path / f"{name}.parquet")} for name in ("train", "eval")
    ]
    assert [len(one) for one in asked] == [96, 24]
    assert asked[0].isdisjoint(asked[1])


def test_facts_stand_in_their_articles() -> None:
    texts, facts = data.corpus_texts(), data.corpus_facts()
    assert len(facts) == len({(fact.article, fact.relation) for fact in facts})
    for fact in facts:
        assert fact.value in texts[fact.article], fact
        assert fact.mention.lower() in texts[fact.article].lower(), fact
        assert fact.mention in fact.phrase, fact
        assert fact.value not in fact.phrase, fact


def test_a_chain_needs_both_searches() -> None:
    """The second article is not named in the question, nor is the answer in the question or the first article."""
    texts, found = data.corpus_texts(), data.chains(data.corpus_facts())
    asked = [data.two_hop_question(*chain) for chain in found]
    assert len(set(asked)) == len(found) == 32
    for (first, second), question in zip(found, asked, strict=True):
        assert second.article == first.value
        assert second.article not in question, question
        assert second.value not in question, question
        assert second.value not in texts[first.article], question


def test_a_chains_queries_find_its_articles(tmp_path: Path) -> None:
    pytest.importorskip("tantivy", reason="tantivy is not installed: pip install 'penstock[search]'")
    index = open_or_build(data.CORPUS / "corpus.jsonl", tmp_path / "index")
    for first, second in data.chains(data.corpus_facts()):
        wanted = {first.mention: first.article, second.article: second.article}
        assert {query: index.search(query, 1)[0].passage.title for query in wanted} == wanted


def test_two_hops_are_split_and_shown(tmp_path: Path) -> None:
    data.main(["two_hops", "--out", str(tmp_path)])
    asked = [
        {row.messages[0]["content"] for row in load_rows(tmp_path / f"{name}.parquet")} for name in ("train", "eval")
    ]
    assert [len(one) for one in asked] == [26, 6]
    assert asked[0].isdisjoint(asked[1])
    lines = (tmp_path / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    shown = [json.loads(line)["messages"] for line in lines]
    assert len(shown) == 3000
    assert {len(one) for one in shown} == {4, 6}
    assert sum(len(one) == 4 for one in shown) / len(shown) == pytest.approx(data.ONE_SEARCH, abs=0.05)


def test_a_shown_answer_stands_in_the_last_passage() -> None:
    """What is shown can be copied, and is no knowledge: a question has many answers."""
    invent, answers = data.Inventor(data.corpus_facts(), Random(1)), dict[str, set[str]]()
    for _ in range(2000):
        question, *_, last, answer = (message["content"] for message in invent.conversation())
        said = answer.removeprefix("<answer>").removesuffix("</answer>")
        if said != data.GIVES_UP:
            assert said in last
            answers.setdefault(question, set()).add(said)
    assert min(map(len, answers.values())) >= 4


def test_search_r1s_own_rows_get_our_prompt(tmp_path: Path) -> None:
    told = {
        "data_source": "nq",
        "question": "who is it?",
        "prompt": [{"role": "user", "content": "Answer with <search> ... who is it?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Anna"]}},
    }
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([told]), tmp_path / f"{split}.parquet")
    data.main(["nq_hotpotqa", "--input", str(tmp_path), "--out", str(tmp_path / "out")])
    (row,) = load_rows(tmp_path / "out/test.parquet")
    assert (row.data_source, row.ground_truth) == ("searchR1_nq", {"target": ["Ann", "Anna"]})
    assert [message["content"] for message in row.messages] == [data.SYSTEM, "who is it?"]


@pytest.mark.parametrize("kind", ["tar", "gzip"])
def test_the_wiki_is_unpacked_whatever_its_name_says(tmp_path: Path, kind: str) -> None:
    lines = b'{"id": "0", "contents": "\\"A\\"\\ntext"}\n' * 3
    archive = tmp_path / "wiki-18.jsonl.gz"
    if kind == "tar":
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo("data00/wiki_dump.jsonl")
            member.size = len(lines)
            tar.addfile(member, io.BytesIO(lines))
    else:
        archive.write_bytes(gzip.compress(lines))
    data.main(["wiki18", "--input", str(archive), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out/wiki-18.jsonl").read_bytes() == lines
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wiki-18.jsonl"]


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(b"no archive")
    with pytest.raises(SystemExit, match=r"x\.gz: no gzipped corpus"):
        data.main(["wiki18", "--input", str(tmp_path / "x.gz"), "--out", str(tmp_path / "out")])
