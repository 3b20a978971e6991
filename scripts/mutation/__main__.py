"""Plant random mistakes in product code, one at a time, and report the share that the tests notice.

  scripts/mutate --count 200 --seed 17
  scripts/mutate --folders trainer transfer_queue/codec --tests tests/trainer tests/transfer_queue
  scripts/mutate --count 400 --state /tmp/mutants.jsonl     continues a run that was stopped, or extends it

How it works:
  1. All tests run once under coverage.py, which records their seconds and the lines that each executes, also in the
     Python processes that it starts.
  2. Lines are drawn at random, each with the same chance; on each line one mistake: a comparison, an operator or a
     constant changed, a condition negated, a statement dropped and so on, in Python and in Lua.
  3. In a copy of the tree the mistake is planted and the tests that execute its line run, the nearest and fastest
     first, until one fails; then those that execute other lines of the file. A Lua script counts as executed by the
     lines that name it. Where no test does, the tests in the folder that mirrors the file's run.
  4. What all tests pass in Python is checked by mypy, as `scripts/test` checks the code beside the tests.
  5. A test that noticed something must pass without the mistake; otherwise the mutant is judged without that test.

A mutant is `noticed` if a test fails, crashes or hangs twice, or mypy says no; `survived` if none does; `skipped` and
replaced by another if all tests that execute its line fail anyway. Where a run fails twice and names no test, as when a
module cannot be imported, the same tests run without the mistake: if that run names none either, the mutant is
`not judged`, which is outside of the share, and a later run with the same --state tries it again. A survivor changes
nothing that can be observed, or shows an effect that no test asserts. Durations, log calls, messages, annotations and
assertions are never changed; the checkout neither.

With --json one object goes to stdout: {"share", "folders": {name: {"planted", "noticed", "survived", "not judged"}},
"mutants": [{"path", "line", "operator", "before", "after", "status", "cause", "by", "tests_run", "tests", "seconds"}]}.
Everything else goes to stderr. Run it in the environment of the tests; what runs beside it makes it slower, not wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutation.campaign import Campaign, Limits, State, draw
from mutation.runs import preload
from mutation.suite import Suite, measure
from mutation.tree import copy_tree, digest, product_files

ENGINES = ("vllm", "sglang", "docker", "slurm", "ray", "browser")
MARKER = " and ".join(f"not {name}" for name in (*ENGINES, "slow", "deep"))
AGENT_LOOPS = "chat* continuation* conversation* ends* generations* journal* llm* merge* mismatch* rendering* segment*"
TRAINER = "advantages* aggregation* batch* corrections* credit* filters* grouping* kl* logprobs* loss.py losses*"
FOLDERS = {  # globs for this tree and for older ones
    "transfer_queue": ["transfer_queue"],
    "agent_loops": [f"agent_loops/{name}" for name in f"{AGENT_LOOPS} template* thinking* token_row*".split()],
    "trainer": [f"trainer/{name}" for name in f"{TRAINER} objective* packing* proximal* returns* shaping*".split()],
    "weight_sync": ["weight_sync", "rollout_server/weights"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    root = options.root.resolve()
    folders = {folder: product_files(root, FOLDERS.get(folder, [folder])) for folder in options.folders}
    if empty := [folder for folder, files in folders.items() if not files]:
        raise SystemExit(f"mutate: no Python or Lua file in {', '.join(empty)}")
    files = sorted({file for files in folders.values() for file in files})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no copy and no process
    state, work = State(options.state), Path(tempfile.mkdtemp(prefix="mutate-")).resolve()
    try:
        measured = measured_tests(root, work, files, options, state)
        limits = Limits(options.count, options.jobs, options.first, options.budget_s, options.grace_s, options.check)
        order = draw(root, files, options.seed)
        campaign = Campaign(root, work, order, Suite(root, measured), state=state, limits=limits)
        campaign.run()
        report = make_report(campaign.verdicts(), folders)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(report, indent=1) if options.json else in_words(report))
    return int(report["share"] < options.at_least)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "mutate", description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=200, help="mutants to judge (200)")
    add("--seed", type=int, default=17, help="draws the lines; a larger count keeps the mutants of a smaller one (17)")
    add("--folders", nargs="+", default=[*FOLDERS], help=f"folders, files or globs ({' '.join(FOLDERS)}, in part)")
    add("--tests", nargs="+", default=["tests"], help="tests to consider: pytest's arguments (tests)")
    add("--marker", default=MARKER, help=f"pytest's -m ({MARKER})")
    add("--jobs", type=int, default=2, help="tests measured, then mutants judged, at once (2)")
    add("--first", type=int, default=30, help="tests that a mutant meets before all others (30)")
    add("--budget-s", type=float, default=60.0, help="measured seconds of tests per mutant (60)")
    add(
        "--grace-s",
        type=float,
        default=20.0,
        help="a run hangs if it takes so long beside 5 times its measured time (20)",
    )
    add("--check", default="mypy", help="command that judges what all tests pass; '' for none (mypy)")
    add("--state", type=Path, help="file that keeps what is known; for the same tree, folders, tests and marker")
    add("--at-least", type=float, default=0.0, help="exit with 1 if the share noticed is below this percentage")
    add("--json", action="store_true", help="one JSON object instead of the table")
    add("--root", type=Path, default=Path(__file__).parents[2], help="the checkout (this one)")
    return parser.parse_args(arguments)


def measured_tests(
    root: Path, work: Path, files: list[str], options: argparse.Namespace, state: State
) -> dict[str, Any]:
    """From the state, or by a run of all tests. Imports what they import."""
    identity = [digest(root), files, options.tests, options.marker]
    if state.measured is None:
        copies = [work / f"copy{number}" for number in range(options.jobs)]
        for copy in copies:
            copy_tree(root, copy)
        measured = measure(copies, work, files, options.tests, options.marker)
        state.add(measured=measured | {"identity": identity})
    if state.measured is None or state.measured["identity"] != identity:
        raise SystemExit(f"mutate: {options.state} is about another tree, or other folders, tests or marker")
    tests = state.measured["tests"]
    passing = sum(passes for _, _, passes, _ in tests)
    print(f"mutate: {passing} of {len(tests)} tests pass, the others are not considered", file=sys.stderr)
    preload(state.measured["modules"], state.measured["environ"])
    return state.measured


def make_report(verdicts: Sequence[Mapping[str, Any]], folders: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    counts = {
        folder: count(verdict for verdict in verdicts if verdict["path"] in files) for folder, files in folders.items()
    }
    return {"share": share_of(count(verdicts)), "folders": counts, "mutants": [*verdicts]}


def count(verdicts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found = Counter(verdict["status"] for verdict in verdicts)
    by_status = {status: found[status] for status in ("noticed", "survived", "not judged")}
    return {"planted": sum(by_status.values()), **by_status}


def share_of(counts: Mapping[str, int]) -> float:
    """Percentage of the judged mutants that were noticed; 0 where none could be judged, 100 where none was planted."""
    judged = counts["noticed"] + counts["survived"]
    return round(100 * counts["noticed"] / judged, 1) if judged else 0.0 if counts["planted"] else 100.0


def in_words(report: Mapping[str, Any]) -> str:
    rows = [f"{'folder':<28} planted  noticed  survived  not judged    share"]
    total = Counter[str]()
    for counts in report["folders"].values():
        total.update(counts)
    for folder, counts in [*report["folders"].items(), ("all", total)]:
        planted, noticed, survived = counts["planted"], counts["noticed"], counts["survived"]
        figures = f"{planted:>7}  {noticed:>7}  {survived:>8}  {counts['not judged']:>10}"
        rows.append(f"{folder:<28} {figures}  {share_of(counts):>5} %")
    for mutant in report["mutants"]:
        if mutant["status"] in ("survived", "not judged"):
            ran = f"{mutant['tests_run']} of {mutant['tests']} tests ran"
            if mutant["status"] == "not judged":
                ran = f"not judged: its tests {mutant['cause']} without the mistake too, and none is named"
            rows.append(f"\n{mutant['path']}:{mutant['line']}  {mutant['operator']}  ({ran})")
            rows.append(f"  - {mutant['before']}\n  + {mutant['after']}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
