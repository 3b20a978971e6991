"""The cold start of recipes: what is trained on is what an episode holds, token for token, and the model learns it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recipes.conftest import RECIPES, script

pytest.importorskip("torch")
pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

from typer.testing import CliRunner

from penstock.agent_loops.chat import chat_of, verify_template
from penstock.deploy import app, load_config

pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.bwrap, pytest.mark.torch]
ORACLE = f"sft.policy={RECIPES / 'retool/policies.py'}:oracle"


@pytest.fixture
def arithmetic(tmp_path: Path) -> str:
    script("retool/data.py").main(["arithmetic", "--out", str(tmp_path), "--train", "32", "--eval", "8"])
    return f"data.train={tmp_path / 'train.parquet'}"


def sft(recipe: str, folder: Path, *overrides: str, status: int = 0) -> str:
    """`penstock sft`; what it said."""
    given = ["sft", str(RECIPES / recipe), "name=cold", f"runs_dir={folder}", "trainer.sinks=[]", *overrides]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == status, done.output
    return done.output


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "cold/metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_a_model_is_left(arithmetic: str, tmp_path: Path) -> None:
    """The boxed answers are new to the tiny model. Its tokenizer comes along; a run can start from the folder."""
    out = tmp_path / "model"
    sft("retool/cpu.yaml", tmp_path, arithmetic, ORACLE, f"sft.out={out}", "sft.steps=12", "sft.batch=8")
    summary = json.loads((tmp_path / "cold" / "summary.json").read_text())
    assert (summary["conversations"], summary["left_out"], summary["model"]) == (32, {}, str(out))
    found = losses(tmp_path)
    assert len(found) == 12
    assert found[-1] < 0.5 * found[0]
    verify_template(chat_of(str(out), load_config(RECIPES / "retool/cpu.yaml").agent), [])


def test_searching_is_learned_from_a_file_of_messages(
    search_r1: Path, searching: Callable[[], str], tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Pisa"}}}
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "On which river is Pisa?"},
        {"role": "assistant", "content": "I look it up.", "tool_calls": [call]},
        {"role": "tool", "content": "Doc 1 (Title: Pisa) Pisa is a city on the Arno."},
        {"role": "assistant", "content": "<answer>Arno</answer>"},
    ]
    file = tmp_path / "demonstrations.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    given = (f"model={search_r1 / 'base'}", searching(), f"sft.messages={file}", f"sft.out={tmp_path / 'm'}")
    sft("search_r1/cpu.yaml", tmp_path, *given, "sft.steps=6")
    found = losses(tmp_path)
    assert found[-1] < found[0]


def test_a_policy_that_solves_nothing_is_refused(arithmetic: str, tmp_path: Path) -> None:
    policy = f"sft.policy={RECIPES / 'retool/policies.py'}:null"
    said = sft("retool/cpu.yaml", tmp_path, arithmetic, policy, "sft.policy_rows=2", status=2)
    assert "solved none of 2 tasks: 2 with reward 0, not 1" in said
    assert not (tmp_path / "cold" / "final_model").exists()
