"""Repositories that an image brings along, and images of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from tests.sandbox.containers import IMAGE, build, docker
from tests.sandbox.swe.conftest import LIMITS

from penstock.sandbox.swe import SweEnvironment, SweTaskError, check_task, snapshot_of

pytestmark = pytest.mark.docker
CLEAN, WITH_HISTORY = "penstock-box:wordkit", "penstock-box:wordkit-history"


@pytest.fixture(scope="module")
def images(tasks) -> Iterator[None]:
    """/testbed as files alone, and with a .git of its own."""
    task = tasks["wordkit-1"]
    for name, then in ((CLEAN, "true"), (WITH_HISTORY, "git -C /testbed init -q")):
        recipe = f"FROM {IMAGE}\nADD snapshot.tgz /testbed\nRUN {then} && chmod -R a+rX /testbed\n"
        snapshot = snapshot_of(task.repository, task.base_commit)
        build(name, {"Dockerfile": recipe.encode(), "snapshot.tgz": snapshot})
    yield
    docker("rmi", "-f", CLEAN, WITH_HISTORY)


@pytest.fixture
def from_image(task):
    return dataclasses.replace(task, repository=None, base_commit=None, sandbox_image=CLEAN)


async def test_environment_image_brings_its_repository(images, docker_sandbox, task, from_image):
    found = await check_task(docker_sandbox, from_image, LIMITS)
    assert found.problems == ()
    in_image = await SweEnvironment.open(docker_sandbox, from_image, LIMITS)
    placed = await SweEnvironment.open(docker_sandbox, task, LIMITS)
    heads = [(await one.run("git rev-parse HEAD")).stdout for one in (in_image, placed)]
    assert heads[0] == heads[1] != ""


async def test_environment_history_in_an_image_is_refused(images, docker_sandbox, from_image):
    with pytest.raises(SweTaskError, match=r"may hold the solution.*RUN rm -rf /testbed/\.git"):
        await SweEnvironment.open(docker_sandbox, dataclasses.replace(from_image, sandbox_image=WITH_HISTORY), LIMITS)
    with pytest.raises(SweTaskError, match="no folder /elsewhere"):
        await SweEnvironment.open(docker_sandbox, dataclasses.replace(from_image, image_folder="/elsewhere"), LIMITS)
