"""The cold start: what is shown is what an episode holds, token for token, and the model learns it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.recipes.conftest import RECIPES, played, script

pytest.importorskip("torch")
pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

from penstock.agent_loops import Budget
from penstock.agent_loops.chat import chat_of, verify_template
from penstock.deploy import load_config
from penstock.transfer_queue import Outcome, OutcomeKind

pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.bwrap, pytest.mark.torch]
cold_start = script("cold_start.py")
LOSS = re.compile(r"^step +\d+  loss (\S+)", re.MULTILINE)


@pytest.fixture
def arithmetic(tmp_path: Path) -> str:
    script("retool/data.py").main(["arithmetic", "--out", str(tmp_path), "--train", "32", "--eval", "8"])
    return f"data.train={tmp_path / 'train.parquet'}"


async def test_messages_become_the_tokens_of_the_episode(arithmetic: str) -> None:
    """An episode that was played, told again as messages, is the same ids with the same mask."""
    (told,) = (await played("retool/cpu.yaml", "oracle", arithmetic, rows=1)).trajectories
    (segment,) = told.segments
    config = load_config(RECIPES / "retool/cpu.yaml", [arithmetic])
    chat = chat_of(config.model, config.agent)
    schemas = await cold_start.schemas_of(config)
    shown = cold_start.segment_of(
        chat.for_episode(Budget(99, 9999)),
        conversation(chat.decode(segment.response_ids), chat.decode(segment.prompt_ids)),
        schemas,
    )
    for name in ("prompt_ids", "response_ids", "response_mask", "turn_starts"):
        np.testing.assert_array_equal(getattr(shown, name), getattr(segment, name), err_msg=name)


def conversation(response: str, prompt: str) -> list[dict[str, object]]:
    """From the text of a played episode: question, call, result, answer."""
    question = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt)[-1]
    code = json.loads(re.search(r"<tool_call>\n(.*?)\n</tool_call>", response)[1])["arguments"]
    result = re.search(r"<tool_response>\n(.*?)\n</tool_response>", response)[1]
    answer = response.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>")
    call = {"type": "function", "function": {"name": "python", "arguments": code}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def test_the_loss_falls_and_a_model_is_left(
    arithmetic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The boxed answers are new to the tiny model. Its tokenizer comes along; a run can start from the folder."""
    policy = f"{RECIPES / 'retool/policies.py'}:oracle"
    given = [
        str(RECIPES / "retool/cpu.yaml"),
        arithmetic,
        "--policy",
        policy,
        "--rows",
        "32",
        "--out",
        str(tmp_path / "model"),
    ]
    cold_start.main([*given, "--steps", "12", "--batch", "8", "--lr", "5e-4"])
    printed = capsys.readouterr().out
    assert "32 of 32 episodes are shown; dropped: none" in printed
    losses = [float(one) for one in LOSS.findall(printed)]
    assert len(losses) == 3, "step 0, 10 and the last"
    assert losses[-1] < 0.5 * losses[0]
    verify_template(chat_of(str(tmp_path / "model"), load_config(RECIPES / "retool/cpu.yaml").agent), [])


def test_searching_is_shown_from_a_file_of_messages(
    search_r1: Path, searching: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    given = [str(RECIPES / "search_r1/cpu.yaml"), f"model={search_r1 / 'base'}", searching()]
    cold_start.main(
        [*given, "--demonstrations", str(file), "--out", str(tmp_path / "m"), "--steps", "6", "--lr", "2e-3"]
    )
    losses = [float(one) for one in LOSS.findall(capsys.readouterr().out)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "x"}], [{"role": "assistant", "content": "x"}]])
def test_what_is_no_demonstration_is_named(
    messages: list[dict[str, str]], search_r1: Path, searching: Callable[[], str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    given = [str(RECIPES / "search_r1/cpu.yaml"), f"model={search_r1 / 'base'}", searching()]
    with pytest.raises(SystemExit, match=r"bad\.jsonl, line 1"):
        cold_start.main([*given, "--demonstrations", str(file), "--out", str(tmp_path / "m")])


def test_a_policy_that_solves_nothing_shows_nothing(arithmetic: str, tmp_path: Path) -> None:
    policy = f"{RECIPES / 'retool/policies.py'}:null"
    given = [str(RECIPES / "retool/cpu.yaml"), arithmetic, "--policy", policy, "--rows", "2"]
    with pytest.raises(SystemExit, match="solved none of 2 rows: 2 with reward 0, not 1"):
        cold_start.main([*given, "--out", str(tmp_path / "m")])
    assert not (tmp_path / "m").exists()


def test_an_episode_without_a_reward_is_counted() -> None:
    cancelled = SimpleNamespace(task_id="rehearsal/0", reward=None, outcome=Outcome(OutcomeKind.CANCELLED, "stopped"))
    found = SimpleNamespace(failures=[], trajectories=[cancelled])
    assert cold_start.why_dropped(found, [1.0]) == {"with reward none, not 1, cancelled (stopped)": 1}
