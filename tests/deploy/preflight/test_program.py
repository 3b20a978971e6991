"""Mistakes in `agent.settings` of the loop `command` are reported before a box is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE, failed

from penstock.deploy import load_config
from penstock.deploy.preflight.agent import check_prompts
from penstock.deploy.preflight.program import check_program


def problem(command: str, *more: str) -> str:
    words = ["agent.loop=command", "tools=[]", f"agent.settings={{command: {command}}}", *more]
    return "; ".join(f"{one.found}; {one.fix}" for one in failed(check_program, *words).values())


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("'/usr/bin/env agent {promt}'", "{promt} is not a placeholder; did you mean 'prompt'?"),
        ("[agent, '{promt}']", "agent.settings.command: {promt}"),
        ("agent, stdin: '{sytem}'", "agent.settings.stdin: {sytem}"),
        ("agent, environment: {KEY: '{api_kee}'}", "agent.settings.environment.KEY: {api_kee}"),
    ],
)
def test_a_misspelt_setting_or_placeholder_is_named(command: str, named: str) -> None:
    assert named in problem(command)


@pytest.mark.parametrize(
    "command",
    [
        "'agent {prompt} {system} {messages} {task_id} {prompt_file} {home} {folder} {expression} ${HOME} {a: 1}'",
        "[agent, '{model}', '{base_url}', '{anthropic_base_url}', '{api_key}']",
        "agent, files: {~/a.py: 'f\"{anything}\"'}",
    ],
)
def test_known_placeholders_columns_and_code_pass(command: str) -> None:
    assert problem(command) == ""


def test_prompts_of_a_program_are_not_those_of_the_tools() -> None:
    words = ["rollout.max_model_len=130", "agent.max_response_tokens=100", "agent.max_new_tokens=100"]
    assert "prompts" in failed(check_prompts, *words)
    check = check_prompts(load_config(RECIPE, [*words, "rollout.max_model_len=100"]))
    assert check is not None
    assert (check.skipped, check.found) == (True, "answers leave them no room: see rollout.max_model_len")
    check = check_prompts(load_config(RECIPE, [*words, "agent.loop=command", "agent.settings={command: agent}"]))
    assert check is not None
    assert (check.verdict, "not known" in check.found) == ("skip", True)


def test_a_program_of_a_shown_folder_is_there_and_can_be_run(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mini"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    folders = f"sandbox.folders={{/agents: {tmp_path}}}"
    assert f"chmod +x {program}" in problem("/agents/bin/mini", folders)
    program.chmod(0o755)
    for right in ("'KEY=a /agents/bin/mini {prompt}'", "[/agents/bin/mini]", "'cd /tmp && /agents/bin/no'", "/usr/x"):
        assert problem(right, folders) == ""
    for wrong in ("'KEY=a /agents/bin/minni {prompt}'", "[/agents/bin/minni]"):
        assert f"{program.parent}/minni on this machine, which does not exist; did you mean 'mini'?" in problem(
            wrong, folders
        )
    assert problem("[/agents/bin/minni]", folders, "sandbox.backend=docker") == ""
    (program.parent / "link").symlink_to("/agents/bin/mini")  # which only a box has
    assert problem("/agents/bin/link", folders) == ""
