"""What can be shown of `scripts/gpu-check` without a GPU: what it refuses, which steps it has, and what it makes of
their files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.child import ROOT
from benchmarks.support.gpu_report import main
from benchmarks.support.gpu_runs import parse

KINDS = ("", "-vllm", "-sglang")
JUNIT = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
BASH = "#!/bin/bash\n"
NOTE = 'printf "%s %s" "$PENSTOCK_TEST_DTYPE$PENSTOCK_BENCH_ENGINE" "${0##*/}" >>"$NOTES"\n'
NOTE += 'printf " %q" "$@" >>"$NOTES"\necho >>"$NOTES"\n'
"""A program that notes how it was called."""
REPORT = f'[[ "$*" != *gpu_report* ]] || PYTHONPATH={ROOT}/src:{ROOT} exec {sys.executable} "$@"\n'
ENDS = 'case "$*" in *"$FAILS"*) exit 3 ;; *"$HANGS"*) sleep 60 ;; esac\n'


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("nvidia_smi", "variables", "reason"),
    [
        (None, {}, "needs an NVIDIA GPU"),
        ("No devices were found", {}, "lists no GPU"),
        ("GPU 0: NVIDIA X", {"GPU_CHECK_STEPS": "conformence-*"}, "GPU_CHECK_STEPS=conformence-* names no step"),
    ],
)
def test_refusals_come_before_anything_is_installed(
    nvidia_smi: str | None, variables: dict[str, str], reason: str, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "grep"):
        (programs / name).symlink_to(next(p for p in map(Path, ("/bin/" + name, "/usr/bin/" + name)) if p.exists()))
    if nvidia_smi is not None:
        executable(programs / "nvidia-smi", f"#!/bin/sh\necho '{nvidia_smi}'\n")
    refused = subprocess.run(
        [ROOT / "scripts" / "gpu-check", tmp_path / "out"],
        env={**os.environ, "PATH": str(programs), **variables},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2
    assert reason in refused.stderr
    assert not (tmp_path / "out").exists()


class Checkout:
    """A copy of the script whose programs note how they are called, with so many GPUs."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder, self.notes = folder, folder / "notes"
        for name in ("scripts/gpu-check", "deploy/preflight/torch_builds.py"):
            executable(folder / name, (ROOT / name).read_text())
        for name in ("setup", "setup-megatron"):
            executable(folder / "scripts" / name, "#!/bin/sh\n")
        for venv in (".venv", ".venv-vllm", ".venv-sglang"):
            executable(folder / venv / "bin" / "python", "#!/bin/sh\n")
        programs = folder / "programs"
        (folder / ".venv" / "bin" / "activate").write_text(f"export PATH={programs}:$PATH\n")
        for name in ("pytest", "penstock", "python", "python3"):
            executable(programs / name, BASH + (REPORT if name == "python" else "") + NOTE + ENDS)
        lines = "\n".join(f"GPU {number}: NVIDIA X" for number in range(gpus))
        executable(folder / "system" / "nvidia-smi", f"#!/bin/sh\necho '{lines}'\n")

    def steps(self, status: int = 0, **variables: str) -> list[list[str]]:
        """The words of every call: [dtype or engine of a benchmark, program, argument…], but for reports."""
        done = subprocess.run(
            [self.folder / "scripts" / "gpu-check", "out"],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
                **{"PATH": f"{self.folder / 'system'}:{os.environ['PATH']}", "NOTES": str(self.notes)},
                **{"FAILS": "nothing", "HANGS": "nothing", **variables},
            },
            capture_output=True,
            check=False,
            text=True,
            timeout=500,
        )
        assert done.returncode == status, done.stderr
        notes = [line.split(" ", 1) for line in self.notes.read_text().splitlines()]
        return [[first, *shlex.split(rest)] for first, rest in notes]

    def table(self) -> str:
        return (self.folder / "out" / "table.md").read_text()

    def left_out(self) -> dict[str, str]:
        return {file.stem: file.read_text() for file in (self.folder / "out").glob("*.left-out")}


def test_its_steps_on_one_gpu(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, gpus=1)
    calls = checkout.steps()
    tested = [call for call in calls if call[1] == "pytest"]
    for path in (word for call in tested for word in call if word.startswith("tests/")):
        assert (ROOT / path).exists(), path
    conformance = {call[-1]: call[0] for call in tested if "tests/rollout_server/conformance" in call}
    assert conformance == {"hf": "", "vllm": "bfloat16", "sglang": "bfloat16"}
    runs = [parse(call[4:]) for call in calls if "benchmarks.support.gpu_runs" in call]
    assert [(run.kind, run.engine, run.level) for run in runs] == [
        ("one-step", "hf", 1),
        *(("colocated", engine, level) for engine in ("vllm", "sglang") for level in (1, 2)),
    ]
    benches = [(call[0], call[3]) for call in calls if call[1] == "penstock"]
    assert benches == [(engine, bench) for engine in ("vllm", "sglang") for bench in ("rollout", "weights")]
    assert "| ranks-nccl | left out:" in checkout.table()
    versions, swap, step, *_ = calls
    assert versions[1:] == [
        "python3",
        "deploy/preflight/torch_builds.py",
        *(f".venv{kind}/bin/python" for kind in KINDS),
    ]
    assert swap[-1] == "vllm and keep_marks"
    assert step[3:] == ["benchmarks.support.gpu_runs", "one-step", "out"]
    assert "this machine has 1" in checkout.left_out()["ranks-nccl"]
    assert "GPU_CHECK_MODEL" in checkout.left_out()["gsm8k"]


def test_its_steps_on_two_gpus_with_a_model(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, gpus=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows").mkdir()
    given = {"GPU_CHECK_STEPS": "ranks-nccl gsm8k", "GPU_CHECK_MODEL": "model"}
    checkout.steps(**given)
    assert "GPU_CHECK_GSM8K" in checkout.left_out()["gsm8k"]
    checkout.notes.unlink()
    calls = checkout.steps(**given, GPU_CHECK_GSM8K="rows", GPU_CHECK_COLOCATED="false")
    first, second = (parse(call[4:]) for call in calls)
    assert (first.kind, second.kind) == ("ranks", "gsm8k")
    assert (second.model, second.data, second.colocated) == (Path("model"), Path("rows"), False)
    assert checkout.left_out() == {}


def test_steps_that_fail_or_hang_leave_a_table_and_the_next_ones_run(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, gpus=2)
    script = tmp_path / "scripts" / "gpu-check"
    script.write_text(script.read_text().replace("limit=900 run", "limit=1 run"))
    given = {"GPU_CHECK_STEPS": "versions nccl-bucket trainer-step weights", "FAILS": "-k bucket", "HANGS": "one-step"}
    calls = checkout.steps(status=1, **given)
    assert calls[-1][-1] == "tests/weight_sync"
    assert checkout.table().splitlines()[2:] == [
        "| GPU | GPU 0: NVIDIA X; GPU 1: NVIDIA X |",
        "| nccl-bucket | failed (exit status 3) |",
        "| trainer-step | failed: its limit was reached |",
    ]


def test_a_table_can_be_made_while_a_step_runs_and_of_files_that_are_cut_short(tmp_path: Path) -> None:
    (tmp_path / "weights.status").write_text("running\n")
    (tmp_path / "weights.xml").write_text(JUNIT[:40])
    (tmp_path / "bench-weights-vllm.json").write_text('{"bench":')
    (tmp_path / "versions.log").write_text("driver 580.65.06\n.venv/bin/python: torch 2.13.0\n")
    main(tmp_path)
    assert (tmp_path / "table.md").read_text().splitlines()[3:] == [
        "| versions | driver 580.65.06 |",
        "| versions | .venv/bin/python: torch 2.13.0 |",
        "| weights | did not end: gpu-check was ended first |",
    ]


def test_the_table_says_what_passed_what_was_measured_and_what_failed(tmp_path: Path) -> None:
    (tmp_path / "gpus.txt").write_text("NVIDIA X, 80 GB, 600\n")
    (tmp_path / "conformance-vllm.xml").write_text(JUNIT)
    (tmp_path / "conformance-vllm.status").write_text("1\n")
    bench = {"bench": "rollout", "ratio": {"tokens_over_bare_engine_64": 0.97}, "figures": {}, "setup": {}}
    (tmp_path / "bench-rollout-vllm.json").write_text(json.dumps(bench))
    (tmp_path / "bench-rollout-vllm.status").write_text("0\n")
    (tmp_path / "bench-weights-vllm.json").write_text("")  # it ended before it printed anything
    (tmp_path / "bench-weights-vllm.status").write_text("1\n")
    main(tmp_path)
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "| what | result |",
        "|---|---|",
        "| GPU | NVIDIA X, 80 GB, 600 |",
        "| conformance-vllm | 5 passed, 2 failed, 2 skipped |",
        "| bench-rollout-vllm: `tokens_over_bare_engine_64` | 0.97 |",
        "| bench-weights-vllm | failed (exit status 1) |",
        "| conformance-vllm | failed (exit status 1) |",
    ]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["benches"] == {"bench-rollout-vllm": bench}
    assert figures["tests"] == {"conformance-vllm": {"passed": 5, "failed": 2, "skipped": 2}}
