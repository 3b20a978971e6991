"""A real model behind the `openai` package: the recorded logprobs are those of a forward pass over the recorded ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.conftest import CUSTOM_TOOLS, TOOLS, USER, whole
from tests.gateway.recording_server import recording_server

from penstock.rollout_server import RolloutConfig

pytestmark = pytest.mark.torch


@pytest.fixture
def model(tmp_path: Path, tokenizer_for: Callable[[str], Any]) -> str:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    tokenizer = tokenizer_for("qwen2_5")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "model"
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def test_what_a_real_model_said_is_what_is_recorded(tmp_path: Path, model: str) -> None:
    rollout = RolloutConfig(max_model_len=1800, kv_cache_tokens=8192, max_concurrent=8)
    limits = {"max_response_tokens": 1500, "max_new_tokens": 40}
    async with recording_server(tmp_path, model, None, rollout=rollout, **limits) as server:
        episode = await server.open()
        await converse(server.client(episode))
        await converse_in_blocks(server.anthropic(episode))
        trajectory = await server.finish(episode)
    assert [segment.num_turns for segment in trajectory.segments] == [3, 1, 1, 3]
    for segment in trajectory.segments:
        check_logprobs(segment, model)


async def converse(client: openai.AsyncOpenAI) -> None:
    """Three turns, of which the first has three choices and the second is streamed."""
    messages: list[Any] = [USER]
    for turn in range(3):
        if turn == 1:
            said = {"role": "assistant", "content": await streamed(client, messages)}
        else:
            answer = await client.chat.completions.create(
                model="model", messages=messages, tools=TOOLS, n=3 if turn == 0 else 1, logprobs=True, seed=turn
            )
            choice = answer.choices[0]
            spelled = b"".join(bytes(one.bytes) for one in choice.logprobs.content)
            assert spelled.decode(errors="replace").startswith(choice.message.content or "")
            said = choice.message.to_dict()
        messages += [said, {"role": "user", "content": f"And {turn}?"}]


async def converse_in_blocks(client: anthropic.AsyncAnthropic) -> None:
    """Three turns, of which the second is streamed."""
    turns: list[Any] = [{"role": "user", "content": "How are you?"}]
    for turn in range(3):
        asked: Any = {"model": "model", "max_tokens": 30, "messages": turns, "tools": CUSTOM_TOOLS}
        if turn == 1:
            async with client.messages.stream(**asked) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": f"And {turn}?"}]


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    chunks = await client.chat.completions.create(model="model", messages=messages, tools=TOOLS, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def check_logprobs(segment: Any, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([whole(segment)])
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0].log_softmax(-1)
    first = len(segment.prompt_ids)
    for position, (mask, recorded) in enumerate(zip(segment.response_mask, segment.response_logprobs, strict=True)):
        at = first + position
        if mask:
            assert abs(float(scores[at - 1, ids[0, at]]) - float(recorded)) < 1e-3
