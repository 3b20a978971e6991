"""A small pure-Python package with its tests as the files of one repository, and pytest as files for a box."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NEEDED = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_BOX_PYTHON = Path("/usr/bin/python3")


class NoPytest(RuntimeError):
    """This environment has no pytest to copy."""


def write_box_packages(folder: Path) -> Path:
    """Copy this environment's pytest into `folder`. Raises `NoPytest`.

    Byte code is made for the machine's own Python, which boxes of backend ``bwrap`` run; another one does without.
    """
    for name in NEEDED:
        try:
            files = importlib.metadata.files(name) or ()
        except importlib.metadata.PackageNotFoundError as error:
            raise NoPytest(f"{name} is not installed here; pip install pytest") from error
        for file in files:
            # Code, and the versions that pytest's header asks for; pytest uses few of pygments' hundreds of lexers.
            is_needed = file.parts[-1] == "METADATA" or file.parts[-1].endswith(".py")
            if file.parts[:2] == ("pygments", "lexers"):
                is_needed = file.parts[2] in ("__init__.py", "_mapping.py", "python.py", "diff.py")
            if ".." not in file.parts and is_needed:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), folder / file)
    if _BOX_PYTHON.exists():
        command = [str(_BOX_PYTHON), "-m", "compileall", "-q", str(folder)]
        subprocess.run(command, check=True, timeout=120)
    return folder


MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 32 << 20
_LEFT_OUT = {
    "__pycache__",
    ".git",
    ".hg",
    ".tox",
    ".venv",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
}


class PackageError(ValueError):
    """A package that no tasks can be made of; the text says why, and what to give instead."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    """Licence in its metadata; empty if there is none."""
    files: dict[str, bytes]
    """path → content"""

    @property
    def sources(self) -> list[str]:
        """Python files that may be broken: no tests, nothing that builds or steers."""
        return [path for path in sorted(self.files) if path.endswith(".py") and not _is_about_tests(path)]

    @property
    def has_tests(self) -> bool:
        return any(path.endswith(".py") and _is_about_tests(path) for path in self.files)


def read_package(source: str, tests: Path | None = None) -> Package:
    """`source` is a folder (an unpacked sdist, a checkout) or the import name of an installed package.

    `tests` is a folder that becomes its ``tests/``. Raises `PackageError`.
    """
    folder = Path(source)
    package = _of_folder(folder) if folder.is_dir() else _of_installed(source)
    if tests is not None:
        if not tests.is_dir():
            raise PackageError(f"--tests {tests}: no such folder")
        package.files.update({f"tests/{path}": data for path, data in _read(tests)})
    if not package.sources:
        raise PackageError(f"package {source}: no Python files besides tests")
    if not package.has_tests:
        raise PackageError(f"package {source} brings no tests along; give a folder of them with --tests")
    return package


def _of_folder(folder: Path) -> Package:
    files = dict(_read(folder))
    about = next((data.decode("utf-8", "replace") for path, data in files.items() if path.endswith("PKG-INFO")), "")
    fields = {key: _field(about, key) for key in ("Name", "Version", "License-Expression", "License")}
    name = fields["Name"] or re.sub(r"-[0-9].*", "", folder.resolve().name)
    return Package(_plain(name), fields["Version"], fields["License-Expression"] or fields["License"], files)


def _of_installed(name: str) -> Package:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise PackageError(f"--package {name}: neither a folder nor an installed package: {error}") from error
    if spec is None or spec.origin is None:
        raise PackageError(f"--package {name}: neither a folder nor an installed package; pip install it first")
    origin = Path(spec.origin)
    if spec.submodule_search_locations:
        files = {f"{name}/{path}": data for path, data in _read(origin.parent)}
    else:
        files = {origin.name: origin.read_bytes()}
    owners = importlib.metadata.packages_distributions().get(name)
    if not owners:
        return Package(_plain(name), "", "", files)
    about = importlib.metadata.distribution(owners[0])
    for file in about.files or ():  # licences are kept next to the code, so that copies of the tasks have them too
        if re.match(r"(LICEN[CS]E|COPYING|NOTICE)", file.name, re.IGNORECASE) and "dist-info" in str(file):
            files[file.name] = Path(str(file.locate())).read_bytes()
    classifiers = [text for text in about.metadata.get_all("Classifier") or () if text.startswith("License ::")]
    by_classifier = classifiers[0].rpartition(":: ")[2] if classifiers else ""
    licence = _metadata_field(about, "License-Expression") or _metadata_field(about, "License") or by_classifier
    return Package(_plain(name), about.version, licence.splitlines()[0] if licence else "", files)


def _metadata_field(about: importlib.metadata.Distribution, key: str) -> str:
    return str((about.metadata.get_all(key) or [""])[0])


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    total = 0
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if set(inside.parts) & _LEFT_OUT or path.is_symlink() or not path.is_file() or path.suffix == ".pyc":
            continue
        if path.suffix in (".so", ".pyd", ".dylib"):
            raise PackageError(f"{folder} is not pure Python: it holds {inside}")
        data = path.read_bytes()
        total += len(data)
        if total > MAX_BYTES:
            raise PackageError(f"{folder} holds more than {MAX_BYTES >> 20} MiB: too large for a task's box")
        if len(data) <= MAX_FILE_BYTES:
            yield inside.as_posix(), data


def _is_about_tests(path: str) -> bool:
    parts = PurePosixPath(path).parts
    name = parts[-1]
    in_tests = any(part in ("test", "tests", "testing", "docs", "examples", "benchmarks") for part in parts[:-1])
    steers = name in ("setup.py", "conf.py", "conftest.py", "noxfile.py", "__main__.py")
    return in_tests or steers or name.startswith("test_") or name.endswith("_test.py")


def _field(about: str, key: str) -> str:
    match = re.search(rf"^{key}: (.*)$", about, re.MULTILINE)
    return match[1].strip() if match else ""


def _plain(name: str) -> str:
    """Return a name that a folder and an id may have."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-").lower() or "package"
