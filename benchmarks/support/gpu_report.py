"""The results in the folder of `scripts/gpu-check`, as one JSON file and as the table of docs/guide/gpu.md.

python -m benchmarks.support.gpu_report FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RATIOS = ("tokens_over_bare_engine_64", "first_token_over_bare_engine_64")
PAUSES = ("pause_p99_over_engine_load", "others_tokens_during_update")


def collect(folder: Path) -> dict[str, Any]:
    """gpus, step → exit status or why it was left out, suite → counts, run and benchmark → its JSON. A step that wrote
    nothing is not in it."""
    return {
        "gpus": _lines(folder / "gpus.txt"),
        "versions": _lines(folder / "versions.log"),
        "status": {file.stem: file.read_text().strip() for file in sorted(folder.glob("*.status"))},
        "left_out": {file.stem: file.read_text().strip() for file in sorted(folder.glob("*.left-out"))},
        "tests": {file.stem: found for file in sorted(folder.glob("*.xml")) if (found := _counts(file))},
        "runs": {file.stem: found for file in sorted(folder.glob("run-*.json")) if (found := _json(file))},
        "benches": {file.stem: found for file in sorted(folder.glob("bench-*.json")) if (found := _json(file))},
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    rows = [("GPU", "; ".join(found["gpus"]) or "?"), *(("versions", line) for line in found["versions"])]
    for suite, counts in found["tests"].items():
        rows.append((suite, ", ".join(f"{count} {name}" for name, count in counts.items() if count)))
    for name, bench in found["benches"].items():
        wanted = RATIOS if bench["bench"] == "rollout" else PAUSES
        rows += [(f"{name}: `{key}`", str(bench["ratio"][key])) for key in wanted if key in bench["ratio"]]
    for name, run in found["runs"].items():
        figures = {"dtype": run["dtype"], **run["figures"]}
        rows += [(f"{name}: {figure}", _text(value)) for figure, value in figures.items()]
        rows += [(f"{name}: wrong", text) for text in run["wrong"]]
    ends = {"running": "did not end: gpu-check was ended first", "124": "failed: its limit was reached"}
    rows += [
        (step, ends.get(status, f"failed (exit status {status})"))
        for step, status in found["status"].items()
        if status != "0"
    ]
    rows += [(step, f"left out: {reason}") for step, reason in found["left_out"].items()]
    return "\n".join(["| what | result |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items()) or "not measured"
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _counts(file: Path) -> dict[str, int] | None:
    """None of a file whose writer was killed."""
    try:
        suites = ElementTree.parse(file).getroot().iter("testsuite")  # noqa: S314 - written by our own pytest
    except ElementTree.ParseError:
        return None
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
    return {"passed": passed, "failed": total["failures"] + total["errors"], "skipped": total["skipped"]}


def _json(file: Path) -> dict[str, Any] | None:
    """None where its writer ended before all was written."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return None
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text().strip().splitlines() if file.exists() else []


def main(folder: Path) -> None:
    found = collect(folder)
    (folder / "figures.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "table.md").write_text(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
