"""`sandbox.folders`: folders of this machine that every box sees and none can write."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.sandbox.backends import CONFIG

from penstock.sandbox import SandboxConfig, SandboxError, make_sandbox

LOOK = "cat /agents/say; cat /data/deep/say; touch /agents/new; rm -f /agents/say; echo x > /data/deep/say; ls /data"


@pytest.fixture
def shared() -> Iterator[Path]:
    """Where each user may go, and write: what keeps boxes from writing is the mount, not the mode."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "say").write_text("hello\n")
    for path in (folder, folder / "say"):
        path.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("bwrap", marks=pytest.mark.bwrap),
        pytest.param("bwrap by itself", marks=pytest.mark.bwrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
async def test_every_box_sees_them_and_none_writes_them(
    backend: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "bwrap by itself":
        monkeypatch.setattr("penstock.sandbox.bwrap.sandbox.why_no_zygote", lambda *_: "a test says so")
    folders = {"/agents": str(shared), "/data/deep": str(shared)}
    sandbox = make_sandbox(
        CONFIG.model_copy(update={"backend": backend.partition(" ")[0], "folders": folders}), f"tests-{os.getpid()}"
    )
    try:
        for label in ("one", "two"):
            session = await sandbox.start(label)
            result = await session.run(["sh", "-c", LOOK])
            assert result.stdout == "hello\nhello\ndeep\n", result.stderr
            assert result.stderr.count("Read-only file system") == 3
    finally:
        await sandbox.close()
    assert [path.name for path in shared.iterdir()] == ["say"]
    assert (shared / "say").read_text() == "hello\n"


@pytest.mark.parametrize("inside", ["agents", "/", "/usr/agents", "/tmp/agents", "/proc/1", "/a/../usr", "/a/", "//a"])
def test_paths_that_are_a_boxs_own_are_refused(inside: str) -> None:
    with pytest.raises(ValidationError, match="folders"):
        SandboxConfig(folders={inside: "/opt"})


@pytest.mark.bwrap
def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"sandbox\.folders\./agents: .*nothing is not a folder"):
        make_sandbox(CONFIG.model_copy(update={"folders": {"/agents": str(tmp_path / "nothing")}}), "tests")


@pytest.mark.bwrap
@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_a_folder_with_a_way_out_is_refused(tmp_path: Path, kind: str) -> None:
    """A read-only mount keeps no box from connecting to a socket, or from writing into a pipe."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").touch()
    (tmp_path / "link").symlink_to("/dev/null")
    config = CONFIG.model_copy(update={"folders": {"/agents": str(tmp_path)}})
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "pipe":
            os.mkfifo(tmp_path / "deep" / "way")
        else:
            listener.bind(str(tmp_path / "deep" / "way"))
        with pytest.raises(SandboxError, match=r"sandbox\.folders\./agents: .*deep/way is not a file"):
            make_sandbox(config, "tests")


def test_without_boxes_there_is_nothing_to_show(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"backend": "unsafe_subprocess", "folders": {"/agents": str(tmp_path)}})
    with pytest.raises(SandboxError, match="no boxes"):
        make_sandbox(config, "tests")
