"""The recipe as it is, with a tiny random model: every episode has a box, works in it, and is graded."""

from __future__ import annotations

import pytest
from tests.agent_loops.families import TEMPLATES, tokenizer_of
from tests.deploy.conftest import assert_accounts_balance, start_run
from tests.recipes.conftest import steps_of
from tests.recipes.swe.conftest import RECIPE
from tests.tiny_model import save_tiny_model

__all__ = ["start_run"]
pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]
SHORT = (
    *("group_size=2", "groups_per_step=2", "trainer.steps=3", "trainer.checkpoint_every=2", "data.eval=null"),
    *("agent.max_turns=2", "agent.max_new_tokens=16", "agent.max_response_tokens=600", "agent.concurrency=2"),
    *("sandbox.max_boxes=2", "agent.settings={reminders: 1}"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of(TEMPLATES / "qwen2_5.jinja", "<|im_end|>")
    save_tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_fully_asynchronous_over_bwrap_boxes(start_run, data, model):
    run = start_run("swe", f"model={model}", *SHORT, cwd=data.folder, recipe=RECIPE / "cpu.yaml")
    summary = run.finish()
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
    assert [step["reward"] for step in steps_of(run)] == [0.0, 0.0, 0.0], "a random model repairs nothing"
    seen = "".join(path.read_text() for path in sorted((run.root / "trajectories").rglob("*")) if path.is_file())
    assert "$ git ls-files | head -n 60" in seen
    assert "mdurl/_encode.py" in seen or "sortedcontainers/sortedlist.py" in seen
