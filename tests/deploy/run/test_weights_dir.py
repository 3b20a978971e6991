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


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Shared memory of this test: in the machine's, runs of other tests remove what a killed run left."""
    monkeypatch.setattr("penstock.deploy.run.weights_folder.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def config_of(runs_dir: Path, *words: str):
    return load_config(RECIPE, [f"runs_dir={runs_dir}", "name=twins", *words])


def test_the_folder_is_named_by_place_and_token(tmp_path, memory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = config_of(tmp_path / "a"), config_of(tmp_path / "b")
    folders = [weights_dir(config, token) for config in (first, second) for token in ("one", "two")]
    assert len(set(folders)) == 4
    assert not any("one" in folder.name or "two" in folder.name for folder in folders)
    assert local_weights_dir(config_of(Path("a")), "one") == folders[0], "a relative runs_dir is the same place"
    for folder in folders:
        folder.mkdir()
    assert {folder.name.rsplit("-", 2)[0] for folder in memory.iterdir()} == {"penstock-twins"}
    remove_weights(first)
    assert sorted(memory.iterdir()) == sorted(folders[2:]), "those of the other run of this name stay"


def test_weights_dir_on_a_shared_disk(tmp_path, memory):
    config = config_of(tmp_path, "rollout.weight_transport=disk")
    assert weights_dir(config, TOKEN) == tmp_path / "twins" / "weights"
    assert local_weights_dir(config, TOKEN).parent == memory


def test_remove_weights_takes_all_lives_of_a_run_and_nothing_else(tmp_path, memory):
    config = config_of(tmp_path)
    held = [hold_folder(local_weights_dir(config, token)) for token in ("one", "two")]
    with weights_entered(config, "three"):
        pass
    link = local_weights_dir(config, "four")
    link.symlink_to(tmp_path)
    assert len(list(memory.iterdir())) == 3, "an empty folder goes with its last role"
    remove_weights(config)
    assert list(memory.iterdir()) == [link], "another user's, perhaps: not followed"
    for descriptor in held:
        os.close(descriptor)


async def test_a_squatted_folder_refuses_the_run(tmp_path, memory, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    config = config_of(tmp_path / "runs")
    folder = local_weights_dir(config, TOKEN)
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
CLEAN = f"{PRIVATE}\nfrom penstock.deploy.cli import main\nmain()\n"


def head_of(config, memory):
    """A real head with its redis-server, which has no roles yet; and its folder of weights."""
    settings = [f"runs_dir={config.runs_dir}", f"name={config.name}"]
    command = [sys.executable, "-c", HEAD, str(memory), str(RECIPE), *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    (folder,) = memory.glob(f"{local_weights_prefix(config).name}*")
    return process, folder


@pytest.mark.redis
def test_clean_removes_what_a_killed_run_left_and_keeps_a_living_ones(tmp_path, memory):
    dead, alive = config_of(tmp_path / "dead"), config_of(tmp_path / "alive")
    heads = [head_of(config, memory) for config in (dead, alive)]
    (killed, abandoned), (_, owned) = heads
    try:
        (abandoned / "weights-00000001.safetensors").write_bytes(b"\0" * 2_000_000)
        killed.kill()
        killed.wait()
        assert abandoned.is_dir()
        clean = [sys.executable, "-c", CLEAN, str(memory), "clean"]
        output = subprocess.run(clean, capture_output=True, text=True, check=True, timeout=120).stdout
        assert f"removed {abandoned} (2 MB)" in output
        assert f"kept {owned}" in output
        assert (abandoned.exists(), owned.is_dir()) == (False, True)
        with RunLock(RunDir.of(dead), resume=False):  # it trained nothing: its name is free
            assert not RunDir.of(dead).connect_env.exists()
    finally:
        for head, _ in heads:
            head.terminate()
            head.wait()
    assert not owned.exists()


def test_the_next_role_of_any_run_removes_what_a_killed_one_left(tmp_path, memory):
    dead, config = config_of(tmp_path / "a"), config_of(tmp_path / "b")
    os.close(hold_folder(local_weights_dir(dead, "one")))
    (local_weights_dir(dead, "one") / "file").touch()
    held = hold_folder(local_weights_dir(dead, "two"))
    others = memory / "penstock-of-another-program"
    others.mkdir()
    with weights_entered(config, TOKEN) as folder:
        assert set(memory.iterdir()) == {folder, local_weights_dir(dead, "two"), others}
    os.close(held)
