"""Published images become images of boxes: without history, without hidden tests, with all else."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from tests.recipes.swe.conftest import RECIPE
from tests.sandbox.containers import IMAGE, build, docker
from tests.sandbox.swe.conftest import LIMITS, docker_sandbox, rows, tasks

from penstock.sandbox.harbor import packed
from penstock.sandbox.swe import SweEnvironment, check_task

__all__ = ["docker_sandbox", "rows", "tasks"]
pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.docker]
PUBLISHED, OURS = "penstock-box:published", "penstock-swe:wordkit-1"


@pytest.fixture
def published(rows):
    """The repository with its future in .git, its hidden tests beside it, a Python of its own in it."""
    made = f"FROM {IMAGE}\nADD repo.tar /testbed\nWORKDIR /testbed\n"
    made += f"RUN git -c safe.directory=* checkout -q {rows[0]['base_commit']} && mkdir -p /r2e_tests .venv/bin\n"
    made += "RUN ln -s /usr/bin/python3 .venv/bin/python && echo secret > /r2e_tests/test_1.py\n"
    build(PUBLISHED, {"Dockerfile": made.encode(), "repo.tar": packed(Path(rows[0]["repository"]))})
    yield
    docker("rmi", "-f", PUBLISHED, OURS)


async def test_an_image_of_a_box_from_a_published_one(published, docker_sandbox, tasks, tmp_path: Path):
    (tmp_path / "images.tsv").write_text(f"{OURS}\t{PUBLISHED}\n{OURS}-2\tpenstock-box:no-such-image\n")
    built = subprocess.run(
        [RECIPE / "build-images", tmp_path / "images.tsv"], capture_output=True, text=True, timeout=200, check=False
    )
    assert built.returncode == 1
    assert built.stdout.split() == [OURS], built.stderr
    assert built.stderr.strip().endswith(f"not made: {OURS}-2")
    task = dataclasses.replace(
        tasks["wordkit-1"],
        repository=None,
        base_commit=None,
        sandbox_image=OURS,
        test_command="/opt/venv/bin/python -m pytest",
    )
    assert (await check_task(docker_sandbox, task, LIMITS)).problems == ()
    environment = await SweEnvironment.open(docker_sandbox, task, LIMITS)
    looked = await environment.run("git log --oneline --all | wc -l; ls -a . /r2e_tests; git tag")
    await environment.close()
    assert looked.stdout.splitlines()[0] == "1"
    assert ".venv" not in looked.stdout
    assert "test_1.py" not in looked.stdout
