"""The committed base model is what the quickstart needs: small, sharp at copying, and mostly not calling the tool."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[3] / "recipes/calculator"
MODEL = RECIPE / "model"

pytestmark = pytest.mark.torch
transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def recipe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])


def tool() -> dict[str, Any]:
    from traces import PYTHON_TOOL

    return dict(PYTHON_TOOL)


def test_fits_in_git() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 6_000_000


def test_digits_and_signs_are_single_tokens(tokenizer: Any) -> None:
    text = "4821.5*(307-2)/6+0.25"
    assert len(tokenizer(text)["input_ids"]) == len(text)


def test_any_text_survives(tokenizer: Any) -> None:
    text = 'naïve → 雨\n\ttab (x) .5 3. <b> {"a": 1}'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_ends_turns_with_im_end(tokenizer: Any) -> None:
    config = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert tokenizer.eos_token == "<|im_end|>"
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config.get("top_k", 0) == 0


def test_tool_marks_survive_decoding_without_special_tokens(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|><tool_call>x</tool_call><tool_response></tool_response><|im_end|>")["input_ids"]
    assert len(ids) == 7
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert kept == "<tool_call>x</tool_call><tool_response></tool_response>"


CALLS = [{"type": "function", "id": "1", "function": {"name": "python", "arguments": {"code": "print(round(48/2,4))"}}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 48/2?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "24.0"},
    {"role": "tool", "content": "again"},
    {"role": "assistant", "content": "24.0"},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.usefixtures("recipe_path")
def test_template_only_ever_appends(tokenizer: Any) -> None:
    def render(count: int, prompt: bool) -> str:
        turns = CONVERSATION[:count]
        return str(tokenizer.apply_chat_template(turns, tools=[tool()], add_generation_prompt=prompt, tokenize=False))

    whole = render(len(CONVERSATION), False)
    for count, prompt in ((1, True), (2, False), (4, True), (5, False)):
        assert whole.startswith(render(count, prompt))


@pytest.mark.usefixtures("recipe_path")
def test_template_writes_calls_and_responses_as_qwen_does(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[tool()], tokenize=False)
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(round(48/2,4))"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n" in text
    responses = "<tool_response>\n24.0\n</tool_response>\n<tool_response>\nagain\n</tool_response>"
    assert f"<|im_start|>user\n{responses}<|im_end|>\n" in text
    assert json.dumps(tool()) in text


@pytest.mark.usefixtures("recipe_path")
def test_arguments_may_be_text_and_system_prompts_stay(tokenizer: Any) -> None:
    as_text = json.loads(json.dumps(CONVERSATION))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"code": "print(round(48/2,4))"}'
    same = [tokenizer.apply_chat_template(turns, tools=[tool()], tokenize=False) for turns in (as_text, CONVERSATION)]
    assert same[0] == same[1]
    system = [{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]]
    assert "Be brief.\n\n# Tools" in tokenizer.apply_chat_template(system, tools=[tool()], tokenize=False)
    assert "Tools" not in tokenizer.apply_chat_template(system, tokenize=False)


@pytest.mark.usefixtures("recipe_path")
def test_knows_the_tool_by_its_own_description() -> None:
    from penstock.tools import PythonTool

    described = {"name": PythonTool.name, "description": PythonTool.description, "parameters": PythonTool.parameters}
    assert described == tool()["function"]
    # as the template renders it, key order included: another order would be other tokens
    assert json.dumps(described) == json.dumps(tool()["function"])


@pytest.mark.usefixtures("recipe_path")
def test_behaves_as_the_quickstart_needs(tokenizer: Any) -> None:
    import torch
    from tests.recipes.calculator.play import play, summary

    from penstock.datasets import problems

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    played = summary(play(model, tokenizer, problems(256, 0, seed=77)[0], temperature=1.0))
    assert 0.15 <= played["reward"] <= 0.6
    assert 0.15 <= played["calls"] <= 0.5
    assert played["reward_if_called"] >= 0.9
    assert played["reward_if_direct"] <= 0.1
