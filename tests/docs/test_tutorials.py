"""Pages whose blocks are more than programs: a test suite, an image, a task of the reader's own."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import fences, text_of
from tests.sandbox.conftest import why_no_docker
from tests.sandbox.swe.wordkit import make_repository, rows_of

from penstock.datasets.swe import write_box_packages

ROOT = Path(__file__).parents[2]
TESTS, IMAGE = "## Tests of your own", "## A sandbox image of your own"


def blocks(page: str, language: str, heading: str) -> list[str]:
    """The blocks of one language below a heading of the page."""
    start = text_of(page).splitlines().index(heading)
    return [fence.text for fence in fences(page) if fence.language == language and fence.line > start]


def test_my_own_tests_pass(tmp_path, tokenizer_for):
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / "model")
    for text in blocks("docs/guide/loop.md", "python", TESTS):
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "MODEL": "model"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (ended.returncode, "3 passed" in ended.stdout) == (0, True), ended.stdout + ended.stderr


@pytest.mark.docker
@pytest.mark.deep
def test_my_own_sandbox_image(tmp_path, monkeypatch, capsys):
    if reason := why_no_docker():
        pytest.skip(reason)
    page = "docs/guide/swe.md"
    for text in [*blocks(page, "python", IMAGE), *blocks(page, "dockerfile", IMAGE)]:
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    try:
        for commands in blocks(page, "bash", IMAGE):
            subprocess.run(["bash", "-euo", "pipefail", "-c", commands], check=True, timeout=200, capture_output=True)
        for program, expected in zip(("try_box.py", "try_rows.py"), blocks(page, "text", IMAGE), strict=True):
            runpy.run_path(program, run_name="__main__")
            printed = capsys.readouterr().out.splitlines()
            assert [line for line in printed if not line.startswith("docker ")] == expected.splitlines()
    finally:
        subprocess.run(
            ["docker", "rmi", "-f", "my-box:1", "my-box:nautical"], check=False, capture_output=True, timeout=60
        )


@pytest.mark.bwrap
def test_the_page_on_swe_environments(tmp_path, monkeypatch, capsys):
    (program,) = [fence.text for fence in fences("docs/guide/swe.md") if fence.file == "try_swe.py"]
    base = make_repository(tmp_path / "wordkit")
    row = rows_of(tmp_path / "wordkit", base, write_box_packages(tmp_path / "packages"))[0]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({**row, "repository": "wordkit", "packages": "packages"}) + "\n")
    (tmp_path / "try_swe.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("try_swe.py", run_name="__main__")
    passed = {"success": json.loads(row["FAIL_TO_PASS"]), "failure": []}
    assert capsys.readouterr().out == f"wordkit-1 True {passed}\n"
