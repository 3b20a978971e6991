from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE

from penstock.deploy import ConfigError, RunDir, RunLock, load_config, remove_weights
from penstock.deploy.run.launcher import launch
from penstock.deploy.run.weights_folder import (
    hold_folder,
    local_weights_dir,
    local_weights_prefix,
    weights_dir,
    weights_entered,
)

TOKEN = "the token of the run"


def config_of(runs_dir: Path, *words: str):
    return load_config(RECIPE, [f"runs_dir={runs_dir}", "name=twins", *words])


def test_weights_dir_differs_by_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", tmp_path / "shm")
    first, second = config_of(tmp_path / "a"), config_of(tmp_path / "b")
    for config in (first, second):
        weights_dir(config, TOKEN).mkdir(parents=True)
    assert sorted(path.name.rsplit("-", 2)[0] for path in (tmp_path / "shm").iterdir()) == ["penstock-twins"] * 2
    remove_weights(first)
    assert [path for path in (tmp_path / "shm").iterdir()] == [weights_dir(second, TOKEN)]


def test_a_relative_runs_dir_is_the_same_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_weights_dir(config_of(Path("runs")), TOKEN) == local_weights_dir(config_of(tmp_path / "runs"), TOKEN)


def test_weights_dir_on_a_shared_disk(tmp_path):
    config = config_of(tmp_path, "rollout.weight_transport=disk")
    assert weights_dir(config, TOKEN) == tmp_path / "twins" / "weights"
    assert local_weights_dir(config, TOKEN).parent == Path("/dev/shm")


def test_the_folders_name_needs_the_token(tmp_path):
    config = config_of(tmp_path)
    names = {local_weights_dir(config, token).name for token in ("one", "two", "two")}
    assert len(names) == 2
    assert not any("one" in name or "two" in name for name in names)


def test_all_lives_of_a_run_are_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", tmp_path / "shm")
    config = config_of(tmp_path)
    held = [hold_folder(local_weights_dir(config, token)) for token in ("one", "two")]
    with weights_entered(config, "three"):
        pass
    link = local_weights_dir(config, "four")
    link.symlink_to(tmp_path)
    assert len(list(link.parent.iterdir())) == 3, "what is left empty goes at once"
    remove_weights(config)
    assert list(link.parent.iterdir()) == [link], "another user's, perhaps: not followed"
    for descriptor in held:
        os.close(descriptor)


async def test_a_squatted_folder_refuses_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    config = config_of(tmp_path / "runs")
    folder = local_weights_dir(config, TOKEN)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"{folder}.*lrwxrwxrwx"):
        await launch(config)
    assert folder.is_symlink(), "not ours to remove"


PRIVATE = """
import sys
from pathlib import Path
from penstock.deploy.run import weights_folder
weights_folder.SHARED_MEMORY = Path(sys.argv.pop(1))
"""
"""Shared memory of the test's own: in the machine's, runs of other tests remove what a killed run left."""
HEAD = f"""{PRIVATE}
import asyncio
from contextlib import asynccontextmanager
from penstock.deploy import load_config
from penstock.deploy.run.launcher import launch

class Waiting:
    @asynccontextmanager
    async def open(self, config, run):
        print("holds", flush=True)
        await asyncio.sleep(600)
        yield

asyncio.run(launch(load_config(Path(sys.argv[1]), sys.argv[2:]), placement=Waiting()))
"""


CLEAN = f"""{PRIVATE}
from penstock.deploy.cli import main
main()
"""


def head_of(config, memory):
    """A real head with its redis-server, which has no roles yet."""
    settings = [f"runs_dir={config.runs_dir}", f"name={config.name}"]
    command = [sys.executable, "-c", HEAD, str(memory), str(RECIPE), *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    return process


@pytest.mark.redis
def test_clean_removes_what_a_killed_run_left_and_keeps_a_living_ones(tmp_path, monkeypatch):
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", memory)
    dead, alive = config_of(tmp_path / "dead"), config_of(tmp_path / "alive")
    heads = [head_of(config, memory) for config in (dead, alive)]
    try:
        (left,) = local_weights_prefix(dead).parent.glob(f"{local_weights_prefix(dead).name}*")
        (kept,) = local_weights_prefix(alive).parent.glob(f"{local_weights_prefix(alive).name}*")
        (left / "weights-00000001.safetensors").write_bytes(b"\0" * 2_000_000)
        heads[0].kill()
        heads[0].wait()
        assert left.is_dir()
        clean = [sys.executable, "-c", CLEAN, str(memory), "clean"]
        said = subprocess.run(clean, capture_output=True, text=True, check=True, timeout=120).stdout
        assert f"removed {left} (2 MB)" in said
        assert f"kept {kept}" in said
        assert (left.exists(), kept.is_dir()) == (False, True)
        with RunLock(RunDir.of(dead), resume=False):  # it trained nothing: its name is free
            assert not RunDir.of(dead).connect_env.exists()
    finally:
        for head in heads:
            head.terminate()
            head.wait()
    assert not kept.exists()


def test_the_next_role_of_any_run_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", tmp_path / "shm")
    dead, config = config_of(tmp_path / "a"), config_of(tmp_path / "b")
    os.close(hold_folder(local_weights_dir(dead, "one")))
    (local_weights_dir(dead, "one") / "file").touch()
    held = hold_folder(local_weights_dir(dead, "two"))
    others = tmp_path / "shm" / "penstock-of-another-program"
    others.mkdir()
    with weights_entered(config, TOKEN) as folder:
        assert set((tmp_path / "shm").iterdir()) == {folder, local_weights_dir(dead, "two"), others}
    os.close(held)
