from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.sandbox import SandboxConfig
from penstock.sandbox.bwrap.cgroups import CgroupMaker, open_cgroups, remove_abandoned_cgroups
from penstock.sandbox.owner import process_start, this_process

CONFIG = SandboxConfig(memory_mb=100, pids=10, cpus=0.5)


def group_of(path: Path, controllers: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.procs").touch()
    return path


def test_cgroups_version_2_delegates_and_sets_limits(tmp_path: Path) -> None:
    group_of(tmp_path, "cpu memory pids")
    maker, reason = open_cgroups("my run/1", CONFIG, tmp_path)
    assert maker is not None
    assert (maker.version, reason) == (2, "")
    for level in (tmp_path, tmp_path / "penstock", tmp_path / "penstock" / "my_run_1"):
        assert (level / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (box,) = maker.make(3).directories
    assert box.parent == tmp_path / "penstock" / "my_run_1"
    limits = {name: (box / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert limits == {"memory.max": str(100 << 20), "pids.max": "10", "cpu.max": "50000 100000"}


def test_cgroups_a_delegated_group_serves_an_ordinary_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest one above the user's own process that has the controllers; CPU may be missing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    group_of(tmp_path, "cpu memory pids").joinpath("cgroup.procs").unlink()
    mine = group_of(tmp_path / "user.slice" / "mine.service", "memory pids")
    group_of(mine / "job.scope", "pids")
    maker, reason = open_cgroups("run", CONFIG, tmp_path, "0::/user.slice/mine.service/job.scope\n")
    assert maker is not None, reason
    assert maker.parents == (mine / "penstock" / "run",)
    assert (mine / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert not maker.limits_cpu


def test_cgroups_without_delegation_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    group_of(tmp_path, "cpu memory pids").joinpath("cgroup.procs").unlink()
    maker, reason = open_cgroups("run", CONFIG, tmp_path, "0::/\n")
    assert maker is None
    assert "delegated to uid 1000" in reason


def test_cgroups_version_1_sets_each_limit_in_its_own_hierarchy(tmp_path: Path) -> None:
    for controller in ("memory", "pids", "cpu"):
        (tmp_path / controller).mkdir()
    maker, _ = open_cgroups("run", CONFIG, tmp_path)
    assert maker is not None
    memory, pids, cpu = maker.make(0).directories
    assert (memory / "memory.limit_in_bytes").read_text() == str(100 << 20)
    assert (pids / "pids.max").read_text() == "10"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "50000"


def test_cgroups_no_hierarchy_gives_the_reason(tmp_path: Path) -> None:
    maker, reason = open_cgroups("run", CONFIG, tmp_path)
    assert maker is None
    assert "no cgroup hierarchy with memory, pids, cpu" in reason


def test_cgroups_only_groups_of_dead_makers_are_reaped(tmp_path: Path) -> None:
    maker = CgroupMaker(2, (tmp_path,), CONFIG)
    mine, older, gone = f"{maker.prefix}-0", f"{os.getpid()}-1-0", "999999999-5-0"
    for name in (mine, older, gone, "not-ours"):
        (tmp_path / name).mkdir()
    assert maker.reap() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine, "not-ours"])


@pytest.mark.parametrize("version", [1, 2])
def test_cgroups_of_all_killed_owners_are_removed(version: int, tmp_path: Path) -> None:
    controllers = ("memory", "pids", "cpu") if version == 1 else ("",)
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("memory pids cpu")
        (tmp_path / "cgroup.procs").touch()
    for controller in controllers:
        for name in ("run-a/999999999-5-0", "run-a/999999999-5-1", f"run-b/{this_process()}-0-0"):
            (tmp_path / controller / "penstock" / name).mkdir(parents=True)
    assert remove_abandoned_cgroups(tmp_path, "0::/") == 2
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*-0"))
    assert left == sorted(str(Path(c, "penstock", "run-b", f"{this_process()}-0-0")) for c in controllers)
    assert not list(tmp_path.rglob("run-a"))


KILLED = """
import os, signal, sys
from penstock.sandbox import SandboxConfig
from penstock.sandbox.bwrap.cgroups import open_cgroups

maker, reason = open_cgroups(sys.argv[1], SandboxConfig())
if maker is None:
    sys.exit(f"no cgroup: {reason}")
print(*maker.make(0).directories, sep="\\n", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clean_removes_the_cgroups_of_a_killed_worker() -> None:
    argv = [sys.executable, "-c", KILLED, f"clean-{os.getpid()}"]
    killed = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if killed.stderr.startswith("no cgroup: "):
        pytest.skip(f"bubblewrap's boxes have {killed.stderr.strip()}")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folders = [Path(line) for line in killed.stdout.split("\n") if line]
    assert folders
    cleaned = CliRunner().invoke(app, ["clean"])
    assert cleaned.exit_code == 0, cleaned.output
    assert not any(folder.exists() for folder in folders)


def test_cgroups_reaping_beside_another_who_removes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of one owner, as two `penstock doctor`: the folder goes after it was seen."""
    maker = CgroupMaker(2, (tmp_path / "penstock" / "doctor",), CONFIG)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert maker.reap() == 0


def test_cgroups_oom_kills_are_counted_from_either_format(tmp_path: Path) -> None:
    cgroup = CgroupMaker(2, (tmp_path / "penstock" / "run",), CONFIG).make(0)
    assert cgroup.oom_kills() == 0
    cgroup.oom_file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroup.oom_kills() == 3


def test_cgroups_process_start_tells_lives_apart() -> None:
    assert process_start(os.getpid()).isdigit()
    assert process_start(999999999) == ""


@pytest.mark.parametrize(("version", "file"), [(1, "memory.force_empty"), (2, "memory.reclaim")])
def test_cgroups_caches_are_emptied_where_the_kernel_can(tmp_path: Path, version: int, file: str) -> None:
    cgroup = CgroupMaker(version, (tmp_path,) * (3 if version == 1 else 1), CONFIG).make(0, clean_cache=True)
    cgroup.empty_cache()  # a kernel without the file
    assert not (cgroup.directories[0] / file).exists()
    (cgroup.directories[0] / file).touch()
    cgroup.empty_cache()
    assert (cgroup.directories[0] / file).read_text() in ("0", "1T")
