"""`penstock init` and `penstock recipes`: what ships, and the projects made of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.agent_loops import find_loop
from penstock.deploy import app, load_config
from penstock.deploy.shipped import project_files, shipped_recipes, templates, write_project

REPOSITORY = Path(__file__).parents[3]
RECIPES = REPOSITORY / "recipes"
TEMPLATES = sorted(templates())
NEEDS = {"retool": "math_verify", "openai": "agents"}
"""Template → the module without which its parts cannot be loaded."""
PARTS = {"harbor": {"recipe.yaml", "tasks"}, "swe": {"recipe.yaml", "agent.py", "test_project.py"}}
"""What a project is made of where it is not the usual: a loop, a reward, a test."""
ELSEWHERE = {"f.py", "cpu.yaml"}
"""Files that a project's files name and do not need: of a box, of the shipped recipe."""
README_LINES = 16
"""With its blank ones."""


@pytest.fixture
def copied_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipes that a test may change."""
    folder = tmp_path / "shipped"
    shutil.copytree(RECIPES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("penstock.deploy.shipped.RECIPES", folder)
    return folder


def test_the_index_has_every_recipe_that_ships() -> None:
    files = [path for path in RECIPES.rglob("*.yaml") if path.name != "sandbox.yaml"]
    files += [path for path in RECIPES.rglob("*.py") if re.search(r"^SETTINGS = ", path.read_text(), re.MULTILINE)]
    there = {str(path.relative_to(RECIPES)) for path in files}
    assert [one.file for one in shipped_recipes() if not (RECIPES / one.file).is_file()] == []
    assert {one.file for one in shipped_recipes()} == there


def test_the_commands_name_recipes_and_templates() -> None:
    listed = CliRunner().invoke(app, ["recipes"]).output
    described = CliRunner().invoke(app, ["init", "--help"]).output
    assert [one.file for one in shipped_recipes() if one.file not in listed or one.needs not in listed] == []
    assert [name for name in TEMPLATES if name not in listed or f"{name}: " not in described] == []


def test_recipes_have_columns_and_a_form_for_programs() -> None:
    listed = CliRunner().invoke(app, ["recipes"]).output.splitlines()
    assert listed[1].split() == ["name", "needs", "about"]
    listing = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)
    assert {row["name"] for row in listing["recipes"]} == {one.file for one in shipped_recipes()}
    assert {row["name"] for row in listing["templates"]} == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_project_names_its_own_files_alone(name: str, tmp_path: Path) -> None:
    template = templates()[name]
    shipped = "".join(
        (RECIPES / source).read_text() for source in template.files.values() if (RECIPES / source).is_file()
    )
    assert [old for old in template.replace if old not in shipped] == [], "the shipped files have changed"
    texts = {file: content.decode() for file, content in project_files(template) if Path(file).suffix != ".safetensors"}
    there = {Path(file).name for file in texts} | {"model.safetensors"}
    for file, text in texts.items():
        assert "recipes/" not in text, file
        assert "penstock.recipes" not in text, file
        assert "../" not in text, file
        named = set(re.findall(r"(?<![/\w-])[\w-]+\.(?:py|yaml|jinja)\b", text))
        assert named - there - ELSEWHERE == set(), file
    assert len(texts["README.md"].splitlines()) <= README_LINES
    assert PARTS.get(name, {"recipe.yaml", "reward.py", "test_project.py"}) <= set(template.files)


@pytest.mark.recipes
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_project_loads_and_passes_its_tests(name: str, tmp_path: Path) -> None:
    if (module := NEEDS.get(name)) and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    folder = tmp_path / "mine"
    written = write_project(folder, name)
    assert sorted(written) == sorted({one.rstrip("/") + ("/" if (folder / one).is_dir() else "") for one in written})
    config = load_config(folder / "recipe.yaml")
    assert find_loop(config.agent.loop, folder)
    if not (folder / "test_project.py").exists():
        return
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py"]
    ended = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("module", ["sokoban.data", "swe.learn_data", "vision.data"])
def test_a_recipe_s_script_runs_without_a_clone(module: str, tmp_path: Path) -> None:
    """From an empty folder, although it needs other files of its recipe."""
    argv = [sys.executable, "-m", f"penstock.recipes.{module}", "--help"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout[:5]) == (0, "usage"), ended.stderr


def test_a_project_has_the_base_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write_project(folder, "calculator")
    assert load_config(folder / "recipe.yaml").model == str(folder / "model")
    weights = "model/model.safetensors"
    assert (folder / weights).read_bytes() == (RECIPES / "calculator" / weights).read_bytes()


def test_a_new_and_an_empty_folder_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert write_project(tmp_path / "empty", "search_r1") == write_project(tmp_path / "a/new/one", "search_r1")
    assert (tmp_path / "a/new/one/corpus/corpus.jsonl").is_file()
    assert [path.name for path in (tmp_path / "a/new").iterdir()] == ["one"]


def test_a_folder_in_use_and_an_unknown_template_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    unknown = [str(tmp_path / "new"), "--from", "calculater"]
    cases = [([str(path)], [str(path)]) for path in (tmp_path / "mine", tmp_path / "mine/thesis.txt")]
    for words, names in [*cases, (unknown, TEMPLATES)]:
        ended = CliRunner().invoke(app, ["init", *words])
        assert ended.exit_code == 2
        assert [name for name in names if name not in ended.output.replace("\n", "")] == []
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["mine", "mine/thesis.txt"]


def test_a_failure_half_way_leaves_no_folder(tmp_path: Path, copied_recipes: Path) -> None:
    (copied_recipes / "calculator/reward.py").write_bytes(b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        write_project(tmp_path / "mine", "calculator")
    assert not (tmp_path / "mine").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".mine")] == []


def test_quickstart_names_what_a_wheel_cannot_bring(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY / "src")}
    argv = [sys.executable, "-m", "penstock.deploy.cli", "quickstart"]
    ended = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert "bubblewrap" in ended.stderr
    assert not (tmp_path / "runs").exists()
