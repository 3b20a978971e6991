"""A process that holds no model has no torch in it, and whoever wants torch there still gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "recipes" / "calculator" / "model"
pytestmark = pytest.mark.torch

A_ROLE = """
from penstock.agent_loops.chat import chat_of
from penstock.agent_loops import AgentConfig
from penstock.rollout_server.engines.checkpoint import vocab_size

chat = chat_of(model, AgentConfig())
ids = list(chat.prompt_ids([{"role": "user", "content": "1+1"}]))
said = {"torch": "torch" in sys.modules, "rows": vocab_size(model), "ids": ids}
"""
TORCH_LATER = """
from penstock.agent_loops.chat import load_tokenizer

ids = load_tokenizer(model)("1+1")["input_ids"]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits
again = load_tokenizer(model)
said = {"rows": logits.shape[-1], "ids": ids, "later": AutoTokenizer.from_pretrained(model)("1+1")["input_ids"],
        "one class": type(again) is type(AutoTokenizer.from_pretrained(model))}
"""
TORCH_BEFORE = """
import types
from penstock.rollout_server import no_torch

sys.modules["torch"] = fake = types.ModuleType("torch")
with no_torch():
    hidden = sys.modules["torch"] is None
said = {"hidden": hidden, "same": sys.modules["torch"] is fake}
"""
TEMPLATE = """
from transformers import AutoTokenizer

prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(
    [{"role": "user", "content": "1+1"}], add_generation_prompt=True, return_dict=False
)
said = {"torch": "torch" in sys.modules, "ids": list(prompt)}
"""


def said_by(program: str) -> tuple[dict[str, Any], str]:
    whole = f"import json, sys\nmodel = sys.argv[1]\n{program}\nprint(json.dumps(said))"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    ended = subprocess.run(
        [sys.executable, "-c", whole, str(MODEL)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def test_a_role_without_a_model_is_without_torch_and_its_tokens_are_the_same() -> None:
    role, stderr = said_by(A_ROLE)
    stock, _ = said_by(TEMPLATE)
    assert stock["torch"], "transformers no longer imports torch for a tokenizer: no_torch may go"
    assert not role["torch"]
    assert role["ids"] == stock["ids"]
    assert role["rows"] == json.loads((MODEL / "config.json").read_text())["vocab_size"]
    assert "PyTorch" not in stderr


def test_who_imports_transformers_later_sees_torch() -> None:
    said, _ = said_by(TORCH_LATER)
    assert said["ids"] == said["later"]
    assert said["rows"] == json.loads((MODEL / "config.json").read_text())["vocab_size"]
    assert said["one class"], "where transformers is there already, it is used as it is"


def test_torch_that_is_there_already_is_hidden_for_a_while_and_stays() -> None:
    assert said_by(TORCH_BEFORE)[0] == {"hidden": True, "same": True}
