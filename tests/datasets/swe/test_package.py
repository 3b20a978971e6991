"""What is read of a package, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.datasets.swe import PackageError
from penstock.datasets.swe.package import read_package

TESTS = Path(__file__).parents[3] / "recipes/swe/package_tests/mdurl"


def test_an_installed_package_with_tests_of_ours():
    found = read_package("mdurl", TESTS)
    assert (found.name, found.licence) == ("mdurl", "MIT License")
    assert found.version
    assert "mdurl/_parse.py" in found.sources
    assert not any(path.startswith("tests/") for path in found.sources)
    assert "tests/test_parse.py" in found.files
    assert any("LICENSE" in path for path in found.files), "the licence goes with the code"
    assert not any(path.endswith(".pyc") for path in found.files)


def make(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_folder_as_an_sdist_has_it(tmp_path):
    folder = make(tmp_path / "Wordkit-1.2", **{
        "PKG-INFO": "Metadata-Version: 2.4\nName: Word.Kit\nVersion: 1.2\nLicense-Expression: MIT\n",
        "setup.py": "", "src__wordkit__words.py": "A = 1\n", "tests__test_words.py": "", "docs__conf.py": "",
        "src__wordkit__conftest.py": "", ".git__config": "",
    })  # fmt: skip
    found = read_package(str(folder))
    assert (found.name, found.version, found.licence) == ("word-kit", "1.2", "MIT")
    assert found.sources == ["src/wordkit/words.py"]
    assert not any(".git" in path for path in found.files)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tests__test_a.py": ""}, "no Python files besides tests"),
        ({"a.py": ""}, "give a folder of them with --tests"),
        ({"a.py": "", "b.so": "", "tests__test_a.py": ""}, "not pure Python: it holds b.so"),
    ],
)
def test_what_no_tasks_can_be_made_of_is_told(tmp_path, files, message):
    with pytest.raises(PackageError, match=message):
        read_package(str(make(tmp_path / "p", **files)))


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(PackageError, match="neither a folder nor an installed package"):
        read_package("no_such_package_at_all")
    with pytest.raises(PackageError, match=r"--tests .*no such folder"):
        read_package("mdurl", tmp_path / "nowhere")
