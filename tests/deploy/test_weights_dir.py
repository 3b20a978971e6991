from __future__ import annotations

from pathlib import Path

from tests.deploy.conftest import RECIPE

from penstock.deploy import load_config, local_weights_dir, remove_weights, weights_dir


def config_of(runs_dir: Path, *words: str):
    return load_config(RECIPE, [f"runs_dir={runs_dir}", "name=twins", *words])


def test_weights_dir_differs_by_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.deploy.run_dir.SHARED_MEMORY", tmp_path / "shm")
    first, second = config_of(tmp_path / "a"), config_of(tmp_path / "b")
    for config in (first, second):
        weights_dir(config).mkdir(parents=True)
    assert sorted(path.name.rpartition("-")[0] for path in (tmp_path / "shm").iterdir()) == ["penstock-twins"] * 2
    remove_weights(first)
    assert [path for path in (tmp_path / "shm").iterdir()] == [weights_dir(second)]


def test_a_relative_runs_dir_is_the_same_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_weights_dir(config_of(Path("runs"))) == local_weights_dir(config_of(tmp_path / "runs"))


def test_weights_dir_on_a_shared_disk(tmp_path):
    config = config_of(tmp_path, "rollout.weight_transport=disk")
    assert weights_dir(config) == tmp_path / "twins" / "weights"
    assert local_weights_dir(config).parent == Path("/dev/shm")
