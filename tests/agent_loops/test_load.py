"""Files of users, and what they import from beside themselves."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from penstock.agent_loops import LoadError, load_object


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Neither the import path nor the modules of a test reach the next one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(known):
        del sys.modules[name]
    sys.modules.update(known)


def folder_of(root: Path, name: str, *users: str) -> Path:
    """A folder with a neighbour that says the folder's name, and files that ask it."""
    folder = root / name
    (folder / "helpers").mkdir(parents=True)
    (folder / "neighbour.py").write_text(f"NAME = {name!r}\nSEEN = []\n")
    (folder / "helpers" / "__init__.py").write_text("")
    (folder / "helpers" / "deep.py").write_text(f"NAME = {name!r}\n")
    for user in users:
        (folder / user).write_text("from neighbour import NAME, SEEN\nfrom helpers.deep import NAME as DEEP\n")
    return folder


def test_two_folders_have_neighbours_of_one_name(tmp_path):
    first, second = folder_of(tmp_path, "first", "reward.py"), folder_of(tmp_path, "second", "tool.py")
    for name in ("NAME", "DEEP"):
        assert load_object(f"reward.py:{name}", first) == "first"
        assert load_object(f"tool.py:{name}", second) == "second"


def test_load_isolates_imports_per_folder(tmp_path):
    first, second = folder_of(tmp_path, "first", "reward.py", "tool.py"), folder_of(tmp_path, "second", "tool.py")
    load_object("reward.py:SEEN", first).append("seen by the reward")
    assert load_object("tool.py:SEEN", second) == []
    assert load_object("tool.py:SEEN", first) == ["seen by the reward"]


def test_a_neighbour_does_not_shadow_an_installed_package(tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json you know')\n")
    (tmp_path / "reward.py").write_text("import json\nanswer = json.dumps([1])\n")
    assert load_object("reward.py:answer", tmp_path) == "[1]"


def test_load_failure_keeps_other_folders_imports(tmp_path):
    first, second = folder_of(tmp_path, "first", "reward.py", "tool.py"), folder_of(tmp_path, "second")
    (second / "broken.py").write_text("import neighbour\nraise ValueError(neighbour.NAME)\n")
    seen = load_object("reward.py:SEEN", first)
    with pytest.raises(LoadError, match=r"broken\.py cannot be imported: ValueError: second"):
        load_object("broken.py:X", second)
    assert load_object("tool.py:SEEN", first) is seen


def test_a_file_that_another_thread_is_executing_is_waited_for(tmp_path, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "gate", (entered, go), raising=False)
    (tmp_path / "slow.py").write_text("import sys\nentered, go = sys.gate\nentered.set()\ngo.wait(60)\nVALUE = 1\n")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load_object, "slow.py:VALUE", tmp_path)
        assert entered.wait(60)
        second = threads.submit(load_object, "slow.py:VALUE", tmp_path)
        wait([second], timeout=0.3)
        go.set()
        assert (first.result(60), second.result(60)) == (1, 1)


def test_load_object_reads_a_shipped_recipes_file_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_object("recipes/own_loop/agent.py:MyAgent", tmp_path).__name__ == "MyAgent"
    (tmp_path / "recipes/own_loop").mkdir(parents=True)
    (tmp_path / "recipes/own_loop/agent.py").write_text("MyAgent = 'own'\n")
    assert load_object("recipes/own_loop/agent.py:MyAgent", tmp_path) == "own"


def test_a_file_without_a_name_is_told_how_to_name_one(tmp_path):
    with pytest.raises(LoadError, match=r"policies\.py: name what to take from this file, as policies\.py:NAME"):
        load_object("policies.py", tmp_path)
