"""Every block of code on a page works: programs are run, recipes are checked, what is only shown says why."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.commands import desk
from tests.docs.pages import PAGES, ROOT, Fence, fences
from tests.docs.settings import check_recipe_part

__all__ = ["desk"]
LANGUAGES = ("", "text", "console", "bash", "python", "yaml", "json", "toml")
"""What these tests can read; a block in another one is run by a named test, or only shown."""
RUN_BY = {
    "docs/extend/algorithm.md": "tests/docs/test_algorithms.py",
    "docs/guide/environment.md": "tests/docs/test_own_environment.py",
    "docs/guide/tool.md": "tests/tools/test_tutorial.py",
}
"""Pages whose programs have a test of their own, which runs all of them in order."""
NEEDS = {"import torch": "torch", "make_engine(": "torch", "make_sandbox(": "bwrap", "RedisServer(": "redis"}
"""What a program says → the marker of what it needs."""
PROGRAMS = {"bwrap": "bwrap", "redis": "redis-server"}
ALL = [fence for page in PAGES for fence in fences(page)]


def by_language(language: str) -> list[Fence]:
    return [fence for fence in ALL if fence.language == language]


def to_run() -> Iterator[Any]:
    """(page, its programs in order), marked with what they need; test_reference imports what generated pages name."""
    for page in PAGES:
        programs = [one for one in fences(page) if one.language == "python" and not one.shown_only and not one.run_by]
        if programs and page not in RUN_BY:
            needs = sorted({marker for said, marker in NEEDS.items() for one in programs if said in one.text})
            yield pytest.param(programs, needs, marks=[getattr(pytest.mark, name) for name in needs], id=page)


@pytest.mark.parametrize(("programs", "needs"), list(to_run()))
def test_the_programs_of_a_page_run(
    programs: list[Fence], needs: list[str], desk: Path, tokenizer_for: Callable[[str], Any], monkeypatch: Any
) -> None:
    """One after the other in one folder, each as a program of the name that its first line gives it."""
    if missing := [program for need, program in PROGRAMS.items() if need in needs and shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    model = desk / "path" / "to" / "a" / "model"
    if "torch" in needs:
        pytest.importorskip("torch")
        from tests.tiny_model import save_tiny_model

        model.parent.mkdir(parents=True)
        Path(save_tiny_model(desk / "tiny")).rename(model)
    else:
        tokenizer_for("qwen2_5").save_pretrained(model)
    monkeypatch.setenv("MODEL", "path/to/a/model")
    monkeypatch.setattr(sys, "path", [str(desk), *sys.path])
    monkeypatch.setattr(sys, "argv", ["program.py"])
    for fence in programs:
        (desk / (fence.file or "program.py")).write_text(fence.text)
    for fence in programs:
        program = desk / (fence.file or "program.py")
        program.write_text(fence.text)  # programs without a name share one
        runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize(
    "fence", [fence for fence in by_language("python") if fence.shown_only], ids=lambda fence: fence.name
)
def test_what_a_shown_program_imports_is_there(fence: Fence) -> None:
    imports = [one for one in ast.parse(fence.text).body if isinstance(one, ast.Import | ast.ImportFrom)]
    text = ast.unparse(ast.Module(body=list(imports), type_ignores=[]))
    if "penstock.trainer" in text or "torch" in text:
        pytest.importorskip("torch")
    exec(compile(text, fence.name, "exec"), {})


@pytest.mark.parametrize("fence", [one for one in by_language("yaml") if not one.shown_only], ids=lambda one: one.name)
def test_yaml_is_a_part_of_a_recipe(fence: Fence) -> None:
    check_recipe_part(fence.text)


def test_json_toml_and_shown_yaml_can_be_read() -> None:
    for fence in ALL:
        if fence.language == "json":
            json.loads(fence.text)
        if fence.language == "toml":
            tomllib.loads(fence.text)
        if fence.language == "yaml":
            list(yaml.safe_load_all(fence.text))


@pytest.mark.parametrize("page", PAGES)
def test_a_block_of_another_language_has_its_own_test(page: str) -> None:
    others = [f"{one.name} {one.language}" for one in fences(page) if one.language not in LANGUAGES]
    marked = [f"{one.name} {one.language}" for one in fences(page) if one.shown_only or one.run_by or page in RUN_BY]
    assert [one for one in others if one not in marked] == [], (
        "say who runs it: <!-- run by: tests/….py --> or <!-- shown only: the reason --> on the line above"
    )


def test_the_named_tests_read_the_pages() -> None:
    named = [(page, test) for page, test in RUN_BY.items()]
    named += [(fence.page, fence.run_by) for fence in ALL if fence.run_by]
    for page, test in named:
        assert Path(page).stem in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_what_is_only_shown_says_why() -> None:
    assert [fence.name for fence in ALL if fence.shown_only and len(fence.shown_only.split()) < 4] == []


def test_the_shortest_loop_is_the_recipes() -> None:
    shown = next(fence.text for fence in fences("docs/extend/loop.md") if "class MyAgent" in fence.text)
    bodies = [ast.parse(text).body[-1] for text in (shown, (ROOT / "recipes/own_loop/agent.py").read_text())]
    assert len({ast.unparse(part) for body in bodies for part in body.body}) == 1  # type: ignore[attr-defined]
