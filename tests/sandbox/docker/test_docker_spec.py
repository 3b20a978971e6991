"""What follows from what an engine says of itself; no engine is needed."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.sandbox import SandboxConfig, SandboxError
from penstock.sandbox.docker.engine import IMAGE_NAME, DockerEngine, DockerImage, find_image, require_memory_limit
from penstock.sandbox.docker.exec_session import file_error
from penstock.sandbox.docker.sandbox import describe
from penstock.sandbox.docker.spec import container_spec, uid_of
from penstock.sandbox.inside.driver import oom_kills
from penstock.sandbox.protocol import NoSuchImage

ENGINE = DockerEngine(
    version="28.2",
    api_version="v1.50",
    machine="x86_64",
    cgroup_version="2",
    runtimes=("runc", "runsc"),
    default_runtime="runc",
    limits_memory=True,
    limits_pids=True,
    limits_cpu=True,
    remaps_uids=False,
)
IMAGE = DockerImage("tools:1", "sha256:abc", ("/data",))


def spec(config: SandboxConfig, engine: DockerEngine = ENGINE) -> dict[str, object]:
    found: dict[str, object] = container_spec(config, engine, IMAGE, ["python3", "-c", ""], slot=7, labels={})
    return found


def test_spec_settings_become_limits() -> None:
    config = SandboxConfig(memory_mb=100, pids=10, cpus=0.5, tmp_mb=8, runtime="runsc")
    host = spec(config)["HostConfig"]
    assert isinstance(host, dict)
    limits = (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["NanoCpus"], host["Runtime"])
    assert limits == (100 << 20, 100 << 20, 10, 500_000_000, "runsc")
    assert set(host["Tmpfs"]) == {"/tmp", "/data"}
    assert all(f"size={8 << 20}" in options and "nosuid" in options for options in host["Tmpfs"].values())
    assert "Runtime" not in spec(SandboxConfig())["HostConfig"]  # type: ignore[operator]


def test_spec_image_is_pinned_and_its_entry_point_not_run() -> None:
    asked = spec(SandboxConfig())
    assert (asked["Image"], asked["Entrypoint"], asked["Cmd"]) == ("sha256:abc", ["python3"], ["-c", ""])


def test_spec_each_slot_has_a_uid_and_remapped_ones_exist() -> None:
    assert len({uid_of(slot, False) for slot in range(1024)}) == 1024
    assert all(0 < uid_of(slot, True) < 65536 for slot in range(1024))


def test_spec_walls_that_an_engine_lacks_are_said_aloud() -> None:
    config = SandboxConfig()
    words, weak = describe(ENGINE, config, filtered=True)
    assert "cgroup v2" in words
    assert not weak
    words, weak = describe(ENGINE, config.model_copy(update={"runtime": "runsc"}), filtered=True)
    assert "forge results of its session" in words
    assert weak
    words, weak = describe(replace(ENGINE, limits_memory=False, limits_cpu=False), config, filtered=True)
    assert "memory is limited per process, not per box, CPU share is not limited" in words
    assert weak


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 30\noom 4\noom_kill 3\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_spec_both_versions_of_cgroups_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert oom_kills([tmp_path / "missing", tmp_path / name]) == 3
    assert oom_kills([tmp_path / "missing"]) is None


@pytest.mark.parametrize(
    "name",
    [
        "python:3.12-slim",
        "no-such/image:1",
        "localhost:5000/a/b_c.d:v1",
        "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest",
        "python@sha256:0123456789abcdef",
        "sha256:0123456789abcdef",
    ],
)
def test_spec_names_of_images_are_let_through(name: str) -> None:
    assert IMAGE_NAME.fullmatch(name)


@pytest.mark.parametrize(
    "name", ["", "../containers/box", "a/../../info", "a?x=1", "a b", "a%2f..", "-x", "a//b", "a#b"]
)
async def test_spec_refuses_image_names_that_are_paths(name: str) -> None:
    with pytest.raises(NoSuchImage, match="no image's name"):
        await find_image(None, name)  # type: ignore[arg-type]


def test_docker_engine_without_memory_limits_is_refused() -> None:
    unlimited = replace(ENGINE, limits_memory=False)
    with pytest.raises(SandboxError, match=r"sandbox\.memory_unbounded"):
        require_memory_limit(unlimited, allowed=False)
    require_memory_limit(unlimited, allowed=True)
    require_memory_limit(ENGINE, allowed=False)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("sh: can't open nonexistent/x: Permission denied", errno.EACCES),
        ("sh: 1: cannot create /tmp/no such file: Is a directory", errno.EISDIR),
        ("sh: can't create a/b: nonexistent directory", errno.ENOENT),
        ("sh: 1: cannot open a: No such file", errno.ENOENT),
        ("sh: something else", errno.EPERM),
    ],
)
def test_docker_shell_message_becomes_the_error_of_open(text: str, number: int) -> None:
    assert file_error(text, "a").errno == number
