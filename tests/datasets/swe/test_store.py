"""Trees of files in git: the same files are the same commit, and no commit has another one behind it."""

from __future__ import annotations

import subprocess

import pytest

from penstock.datasets.swe import GitFailed
from penstock.datasets.swe.store import TreeStore

FILES = {"a.py": b"one\n", 'odd "name"\\.txt': b"\x00\xff", "folder/ünd.py": "ü\n".encode()}


def git(store: TreeStore, *arguments: str) -> bytes:
    return subprocess.run(["git", "--git-dir", store.folder, *arguments], capture_output=True, check=True).stdout


def test_files_come_back_as_they_were(tmp_path):
    store = TreeStore(tmp_path / "a.git")
    commit = store.commit("one", FILES)
    assert {name: git(store, "show", f"{commit}:{name}") for name in FILES} == FILES
    names = git(store, "ls-tree", "-r", "-z", "--name-only", commit).decode().split("\0")[:-1]
    assert set(names) == set(FILES)


def test_the_same_files_are_the_same_commit_anywhere(tmp_path):
    first, second = TreeStore(tmp_path / "a.git"), TreeStore(tmp_path / "b.git")
    assert first.commit("one", FILES) == second.commit("other", dict(reversed(FILES.items())))


def test_a_name_given_again_names_the_new_files_and_no_commit_has_a_past(tmp_path):
    store = TreeStore(tmp_path / "a.git")
    old = store.commit("one", FILES)
    again = TreeStore(store.folder)
    new = again.commit("one", {"b.py": b"two\n"})
    assert new != old
    assert git(store, "rev-list", new).decode().split() == [new]
    again.pack()
    assert git(store, "for-each-ref", "--format=%(refname) %(objectname)").decode() == f"refs/tasks/one {new}\n"


def test_the_patch_makes_one_of_the_other(tmp_path):
    store = TreeStore(tmp_path / "a.git")
    before = store.commit("before", FILES)
    after = store.commit("after", {**FILES, "a.py": b"two\n", "new.py": b"x"})
    patch = store.diff(before, after)
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "a.py").write_bytes(FILES["a.py"])
    subprocess.run(["git", "apply", "-"], input=patch, cwd=folder, check=True)
    assert (folder / "a.py").read_bytes() == b"two\n"
    assert (folder / "new.py").read_bytes() == b"x"
    assert store.diff(before, before) == b""


def test_git_says_what_is_wrong(tmp_path):
    with pytest.raises(GitFailed, match="git diff-tree"):
        TreeStore(tmp_path / "a.git").diff("nothing", "else")


def test_what_is_forgotten_is_not_there_any_more(tmp_path):
    store = TreeStore(tmp_path / "a.git")
    kept, gone = store.commit("kept", FILES), store.commit("gone", {**FILES, "secret.py": b"the fix\n"})
    store.forget("gone")
    store.pack()
    assert git(store, "rev-list", "--all").decode().split() == [kept]
    assert git(store, "fsck", "--unreachable", "--no-progress").decode() == ""
    assert gone != kept
