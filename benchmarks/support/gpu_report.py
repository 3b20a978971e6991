"""What `scripts/gpu-check` left in its folder, as one JSON file and as the table of docs/gpu.md.

python -m benchmarks.support.gpu_report FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

RATIOS = ("tokens_over_bare_engine_64", "first_token_over_bare_engine_64")
PAUSES = ("pause_p99_over_engine_load", "others_tokens_during_update")
ACCOUNTS = ("lost", "trained_twice", "token_mismatches", "episodes_failed", "restarts")
MIB = 1 << 20


def collect(folder: Path) -> dict[str, Any]:
    """gpus, step → exit status or why it was left out, suite → counts, run and benchmark → its JSON. A step that wrote
    nothing is not in it."""
    return {
        "gpus": _lines(folder / "gpus.txt"),
        "status": {file.stem: int(file.read_text()) for file in sorted(folder.glob("*.status"))},
        "left_out": {file.stem: file.read_text().strip() for file in sorted(folder.glob("*.left-out"))},
        "tests": {file.stem: _counts(file) for file in sorted(folder.glob("*.xml"))},
        "runs": {file.stem: found for file in sorted(folder.glob("run-*.json")) if (found := _json(file))},
        "benches": {file.stem: found for file in sorted(folder.glob("bench-*.json")) if (found := _json(file))},
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    rows = [("GPU", "; ".join(found["gpus"]) or "?")]
    for suite, counts in found["tests"].items():
        rows.append((suite, ", ".join(f"{count} {name}" for name, count in counts.items() if count)))
    for name, bench in found["benches"].items():
        wanted = RATIOS if bench["bench"] == "rollout" else PAUSES
        rows += [(f"{name}: `{key}`", str(bench["ratio"][key])) for key in wanted if key in bench["ratio"]]
    rows += [(f"{name}: {what}", said) for name, run in found["runs"].items() for what, said in _of_run(run)]
    rows += [(step, f"failed (exit status {status})") for step, status in found["status"].items() if status]
    rows += [(step, f"left out: {reason}") for step, reason in found["left_out"].items()]
    return "\n".join(["| what | result |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]) + "\n"


def _of_run(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows for what `gpu_runs.report_of` made."""
    figures = run["figures"]
    yield "steps, seconds of each, in " + run["dtype"], f"{figures['steps']}, {figures['step_s_mean']:.3g}"
    yield "reward of the first and last three steps", f"{_rewards(figures, 'first')}; {_rewards(figures, 'last')}"
    yield (
        "mismatch: KL (k3) mean and most; mean of \\|Δ logprob\\|",
        f"{figures['kl_k3_mean']:.2g}, {figures['kl_k3_max']:.2g}; {_number(figures['logprob_abs_diff_mean'])}",
    )
    yield "staleness mean, most", f"{figures['staleness_mean']:.2g}, {figures['staleness_max']}"
    yield (
        "tokens/s: trained while it trains, sampled over all time",
        f"{figures['trainer_tokens_per_s']:.0f}, {figures['rollout_tokens_per_s']:.0f}",
    )
    yield (
        "MFU; share of the time that the trainer waited",
        f"{_number(figures.get('mfu_mean'))}; " + (f"{figures['waited_share']:.2f}"),
    )
    yield (
        "seconds of a pause mean, most; of a publish",
        f"{_number(figures.get('pause_s_mean'))}, {_number(figures.get('pause_s_max'))}; "
        f"{figures['publish_s_mean']:.2g}",
    )
    if "turns" in figures:
        yield from _of_turns(figures)
    accounts = ", ".join(f"{name} {figures[name]}" for name in ACCOUNTS)
    yield f"accounts of {figures['episodes']} episodes", accounts
    for text in run["wrong"]:
        yield "wrong", text


def _of_turns(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "turns of engine, trainer", ", ".join(str(figures["turns"].get(side, 0)) for side in ("engine", "trainer"))
    used = (figures["device_bytes"].get(side) for side in ("engine", "trainer"))
    yield (
        "most MiB of the GPU in their turns",
        ", ".join("not measured" if one is None else f"{one / MIB:.0f}" for one in used),
    )


def _rewards(figures: Mapping[str, Any], which: str) -> str:
    return " ".join(f"{reward:.2f}" for reward in figures[f"reward_{which}_3"])


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"


def _counts(file: Path) -> dict[str, int]:
    suites = ElementTree.parse(file).getroot().iter("testsuite")  # noqa: S314 - written by our own pytest
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
    return {"passed": passed, "failed": total["failures"] + total["errors"], "skipped": total["skipped"]}


def _json(file: Path) -> dict[str, Any] | None:
    """None where the benchmark ended before it printed its result."""
    text = file.read_text()
    return json.loads(text) if text.strip() else None


def _lines(file: Path) -> list[str]:
    return file.read_text().strip().splitlines() if file.exists() else []


def main(folder: Path) -> None:
    found = collect(folder)
    (folder / "figures.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "table.md").write_text(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
