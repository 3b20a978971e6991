"""ReTool's data as Parquet with verl's columns.

    python -m penstock.recipes.retool.data arithmetic --out data/retool               # generated, for the laptop
    python -m penstock.recipes.retool.data steps --out data/retool-steps              # sums in parts, for learn.yaml
    python -m penstock.recipes.retool.data gsm8k --input DIR --out data/retool-gsm8k  # GSM8K's two files
    python -m penstock.recipes.retool.data dapo --out data/retool-dapo                # DAPO-Math-17k, from the hub
    python -m penstock.recipes.retool.data aime --year 2024 --out data/retool-dapo    # AIME, for evaluation
    python -m penstock.recipes.retool.data demonstrations --out data/retool-sft       # ReTool's own, for the cold start

`--input` takes a file (GSM8K: a folder) that was fetched before.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from penstock.datasets import NoDataset, Row, dataset_file, evaluate, field, parquet_rows, problems, write_parquet

SYSTEM = (
    "Solve the problem. You may run Python with the tool `python`, as often as you like: it computes exactly and shows "
    "what is printed. When you are sure, give the final answer as \\boxed{answer}."
)
DAPO = ("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet")
AIME = {
    2024: ("Maxwell-Jia/AIME_2024", "aime_2024_problems.parquet", "Problem", "Answer"),
    2025: ("yentinglin/aime_2025", "data/train-00000-of-00001-243207c6c994e1bd.parquet", "problem", "answer"),
}
"""Year → repository, file, columns of problem and answer."""
LARGEST = 9999
"""Largest result: digits are copied one by one."""
STOPS = 0.35
"""Share of the cold start's results which are answered although a part follows."""
_CODE = re.compile(r"<code>\s*(?:```python\n)?(.*?)(?:```)?\s*</code>", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    try:
        for path, count in KINDS[options.kind](options).items():
            print(f"{path}: {count} rows")
    except NoDataset as error:
        sys.exit(str(error))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="folder for the Parquet files")
    parser.add_argument("--input", type=Path, help="a file (GSM8K: a folder) that was fetched before")
    parser.add_argument("--train", type=int, default=4096, help="arithmetic, steps: training problems")
    parser.add_argument("--eval", type=int, default=128, help="arithmetic, steps: evaluation problems")
    parser.add_argument("--conversations", type=int, default=2000, help="steps: sums that the cold start shows")
    parser.add_argument("--calls", type=int, default=0, help="gsm8k: most calculations in a problem; 0: any number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--year", type=int, default=2024, choices=sorted(AIME))
    return parser.parse_args(arguments)


def arithmetic(options: argparse.Namespace) -> dict[Path, int]:
    """The calculator's problems with a whole result: math-verify compares six decimals, the tiny model prints four."""
    splits = zip(("train", "eval"), problems(2 * options.train, 2 * options.eval, options.seed), strict=True)
    counts = {"train": options.train, "eval": options.eval}
    return {
        path: save(path, [whole(row) for row in rows if truth_of(row).is_integer()][: counts[split]])
        for split, rows in splits
        for path in [options.out / f"{split}.parquet"]
    }


def truth_of(row: Row) -> float:
    return float(row["reward_model"]["ground_truth"])


def whole(row: Row) -> Row:
    return {**row, "reward_model": {"style": "rule", "ground_truth": str(int(truth_of(row)))}}


@dataclass(frozen=True, slots=True)
class PartedSum:
    """48+17, then *3, then -20. No result occurs twice, so each says which part it is of."""

    parts: tuple[str, ...]
    results: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"What is {self.parts[0]}, then?"

    def expression(self, place: int) -> str:
        """Returns the expression of a part for a model that knows the result of the part before."""
        return f"{self.results[place - 1] if place else ''}{self.parts[place]}"

    def result_text(self, place: int) -> str:
        """Returns the tool's answer to a part."""
        following = self.parts[place + 1 : place + 2]
        return "\nthen ".join([str(self.results[place]), *following])


def steps(options: argparse.Namespace) -> dict[Path, int]:
    """Sums in parts, and conversations that solve some: the others answer a result in the middle, see `worked`."""
    seen: set[PartedSum] = set()
    written = {}
    for split, count in {"train": options.train, "eval": options.eval}.items():
        dice, path = Random(f"{split}/{options.seed}"), options.out / f"{split}.parquet"
        written[path] = save(path, [step_row(new_sum(dice, seen), split, index) for index in range(count)])
    dice, path = Random(f"conversations/{options.seed}"), options.out / "conversations.jsonl"
    conversations = [worked(new_sum(dice, seen), dice) for _ in range(options.conversations)]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations), encoding="utf-8")
    return {**written, path: len(conversations)}


def new_sum(dice: Random, seen: set[PartedSum]) -> PartedSum:
    """One that is not in `seen`, which has it then."""
    while (candidate := random_sum(dice)) in seen:
        pass
    seen.add(candidate)
    return candidate


def random_sum(dice: Random) -> PartedSum:
    start = dice.randint(10, 99)
    parts: list[str] = []
    results = [start]
    for _ in range(dice.choice((3, 4))):
        part, result = random_part(results, dice)
        parts.append(part)
        results.append(result)
    return PartedSum((f"{start}{parts[0]}", *parts[1:]), tuple(results[1:]))


def random_part(results: Sequence[int], dice: Random) -> tuple[str, int]:
    """An operator with its operand, and what it makes of the last result: from 1 to `LARGEST`, and new."""
    while True:
        operator = dice.choice("+-*")
        part = f"{operator}{dice.randint(2, 9) if operator == '*' else dice.randint(10, 99)}"
        result = int(evaluate(f"{results[-1]}{part}"))
        if 0 < result <= LARGEST and result not in results:
            return part, result


def step_row(parted: PartedSum, split: str, index: int) -> Row:
    """The tool reads `parts` and `results`; the prompt has the first part alone."""
    answers = {"parts": " ".join(parted.parts), "results": " ".join(map(str, parted.results))}
    return {
        "data_source": "retool/steps",
        "prompt": [{"role": "user", "content": parted.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(parted.results[-1])},
        "extra_info": {"split": split, "index": index, **answers},
    }


def worked(parted: PartedSum, dice: Random) -> list[dict[str, Any]]:
    """One call per part; at each result that something follows, `STOPS` of them answer it and are done."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": parted.question}]
    for place, result in enumerate(parted.results):
        code = f"print(round({parted.expression(place)},4))"
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "content": parted.result_text(place)})
        if result == parted.results[-1] or dice.random() < STOPS:
            break
    return [*turns, {"role": "assistant", "content": str(result)}]


def gsm8k(options: argparse.Namespace) -> dict[Path, int]:
    """Real word problems, `question` and `answer` kept in extra_info as verl does."""
    if options.input is None:
        raise NoDataset("gsm8k: --input takes the folder with GSM8K's train.jsonl and test.jsonl")
    written = {}
    for split in ("train", "test"):
        path = options.out / f"{split}.parquet"
        rows = list(gsm8k_rows(options.input / f"{split}.jsonl", split))
        written[path] = save(path, [row for row in rows if not options.calls or 0 < calculations(row) <= options.calls])
    return written


def calculations(row: Row) -> int:
    """Returns the number of annotations, like ``<<48/2=24>>``, in a row's solution."""
    return str(row["extra_info"]["answer"]).count("<<")


def gsm8k_rows(path: Path, split: str) -> Iterator[Row]:
    """Raises `NoDataset` naming the file and the line."""
    if not path.is_file():
        raise NoDataset(f"{path}: no such file")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            question, solution = entry["question"], entry["answer"]
            truth = solution.rpartition("####")[2].strip().replace(",", "")
            float(truth)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoDataset(f"{path}, line {number}: not GSM8K's: {error!r}") from error
        yield row(question, truth, "openai/gsm8k", split, number - 1, answer=solution)


def dapo(options: argparse.Namespace) -> dict[Path, int]:
    """The published file repeats each of its 17,398 problems a hundred times: each is taken once."""
    source = dataset_file(*DAPO, options.input)
    rows: dict[str, Row] = {}
    for number, entry in enumerate(parquet_rows(source), start=1):
        problem = dapo_problem(str(field(entry, "prompt", source, number)[0]["content"]))
        if problem not in rows:
            truth = field(entry, "reward_model", source, number)["ground_truth"]
            rows[problem] = row(problem, str(truth), "math_dapo", "train", len(rows))
    path = options.out / "train.parquet"
    return {path: save(path, list(rows.values()))}


def dapo_problem(prompt: str) -> str:
    """The problem without DAPO's own instructions about the form of the answer."""
    pattern = re.compile(
        r"^Solve the following math problem step by step\..*?\n\n(.*)\n\nRemember to put your", re.DOTALL
    )
    match = pattern.search(prompt)
    return match.group(1).strip() if match else prompt.strip()


def aime(options: argparse.Namespace) -> dict[Path, int]:
    repository, name, problem, answer = AIME[options.year]
    source = dataset_file(repository, name, options.input)
    rows = [
        row(
            str(field(entry, problem, source, number)),
            str(int(field(entry, answer, source, number))),  # "025" is 25
            f"aime{options.year}",
            "test",
            number - 1,
        )
        for number, entry in enumerate(parquet_rows(source), start=1)
    ]
    path = options.out / f"aime{options.year}.parquet"
    return {path: save(path, rows)}


def demonstrations(options: argparse.Namespace) -> dict[Path, int]:
    """JSON lines with `messages`, calls as tool calls of `python`: what `sft.messages` of `penstock sft` reads."""
    source = dataset_file("JoeYing/ReTool-SFT", "train_2000.parquet", options.input)
    lines = []
    for number, entry in enumerate(parquet_rows(source), start=1):
        messages = conversation(field(entry, "messages", source, number))
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    path = options.out / "demonstrations.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return {path: len(lines)}


def conversation(messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """One of ReTool's demonstrations: its text with ``<code>`` and ``<interpreter>`` becomes calls and results."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    answer = next(message["content"] for message in messages if message["role"] == "assistant")
    question = question.rpartition("*user question:*")[2].strip()
    turns: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    at = 0
    for code in _CODE.finditer(answer):
        of_interpreter = re.compile(r"<interpreter>\n?(.*?)\n?</interpreter>", re.DOTALL)
        printed = of_interpreter.search(answer, code.end())
        if printed is None:
            break
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": code.group(1).strip()}}}
        turns.append({"role": "assistant", "content": answer[at : code.start()].strip(), "tool_calls": [call]})
        turns.append({"role": "tool", "content": printed.group(1).strip() or "(no output)"})
        at = printed.end()
    turns.append({"role": "assistant", "content": answer[at:].replace("<answer>", "").replace("</answer>", "").strip()})
    return turns


def row(problem: str, truth: str, source: str, split: str, index: int, **extra: str) -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": problem, **extra},
    }


def save(path: Path, rows: list[Row]) -> int:
    write_parquet(rows, path)
    return len(rows)


KINDS = {
    "arithmetic": arithmetic,
    "steps": steps,
    "gsm8k": gsm8k,
    "dapo": dapo,
    "aime": aime,
    "demonstrations": demonstrations,
}

if __name__ == "__main__":
    main()
