"""Every command on a page is one that the program takes: options, recipes, keys and values included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.docs.commands import Wrong, check, check_name, desk, simple_commands
from tests.docs.pages import PAGES, WITH_COMMANDS, command_texts, fences, inline_commands, our_code
from tests.docs.settings import unknown_key

from penstock.deploy import ConfigError, check_template, load_config
from penstock.simulator import BadSetup

__all__ = ["desk"]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_is_one_that_the_program_takes(page: str, desk: Path) -> None:
    for fence in fences(page):
        if fence.language == "python" and fence.file:
            (desk / fence.file).parent.mkdir(parents=True, exist_ok=True)
            (desk / fence.file).write_text(fence.text)
    for text in command_texts(page):
        for words in simple_commands(text):
            check(words, desk)
    for text in inline_commands(page):
        check_name(text, desk)


@pytest.mark.torch
def test_every_run_on_a_page_has_an_algorithm_that_fits(desk: Path) -> None:
    pytest.importorskip("torch")
    from penstock.trainer import check_algorithm

    runs = [words[2:] for page in WITH_COMMANDS for text in command_texts(page) for words in simple_commands(text)
            if words[:2] == ["penstock", "run"] and words[2].startswith("recipes/")]  # fmt: skip
    assert len(runs) > 40
    for recipe, *rest in runs:
        config = load_config(Path(recipe), [word for word in rest if "=" in word])
        check_algorithm(config.trainer, config.group_size)


TOOL = '''
from penstock.tools import function_tool
@function_tool(name="python")
def calculate(code: str) -> str:
    """Prints print(round(EXPRESSION,4)) without running anything."""
    return code
'''


@pytest.mark.bwrap
def test_a_tool_in_the_current_directory_is_found_before_the_run(desk: Path) -> None:
    """By the checks of `doctor` and `run`, as by workers later."""
    (desk / "found_here.py").write_text(TOOL)
    config = load_config(Path("recipes/calculator.yaml"), ["tools=[{name: found_here.calculate}]"])
    found = check_template(config)
    assert found is not None
    assert found.ok, found.found


def test_bash_can_read_every_bash_block() -> None:
    for fence in (one for page in WITH_COMMANDS for one in fences(page)):
        if fence.language == "bash" and not fence.shown_only:
            read = subprocess.run(["bash", "-n"], input=fence.text.encode(), capture_output=True, check=False)
            assert read.returncode == 0, f"{fence.name}: {read.stderr!r}"


@pytest.mark.parametrize("page", PAGES)
def test_every_key_in_the_prose_exists(page: str) -> None:
    assert [code for code in our_code(page) if unknown_key(code)] == []


@pytest.mark.parametrize(
    "line",
    [
        "penstock run recipes/calculator.yaml trainer.larning_rate=1",
        "penstock run recipes/calculator.yaml trainer.lr=fast",
        "penstock run recipes/calculater.yaml",
        "penstock run recipes/calculator.yaml agent.loop=missing.py:Loop",
        "penstock run RECIPE --dry",
        "penstock rum recipes/calculator.yaml",
        "penstock queue dead-letter list",
        "penstock queue",
        "penstock rollout --wait-s soon",
        "penstock sandbox trainer.lr=1",
        "penstock bench quue --json",
        "penstock simulate simulator/setups/agentic-64.yaml rollout.server=1",
        "scripts/setup --everything",
        "scripts/set-up",
        "python -m penstock.deploy.configuration",
        "python -m penstock.recipes.retool.data arithmetic --output data/retool",
        "pytest -m browsers",
        "pip install 'penstock[voice]'",
        "penstok run RECIPE",
    ],
)
def test_a_command_that_is_none_is_noticed(line: str, desk: Path) -> None:
    (words,) = simple_commands(line)
    with pytest.raises((Wrong, ConfigError, BadSetup)):
        check(words, desk)


def test_commands_are_found_behind_one_another() -> None:
    text = "A=1 . x.env; penstock run a.yaml x=1 2> log.txt && penstock agent \\\n  --name b | tee log  # penstock no\n"
    found = [[".", "x.env"], ["penstock", "run", "a.yaml", "x=1"], ["penstock", "agent", "--name", "b"], ["tee", "log"]]
    assert list(simple_commands(text)) == found


def test_a_key_that_does_not_exist_is_noticed() -> None:
    assert [unknown_key(code) for code in ("trainer.lr", "trainer.lr=1e-6", "trainer.learning")] == [
        "",
        "",
        "trainer.learning",
    ]
