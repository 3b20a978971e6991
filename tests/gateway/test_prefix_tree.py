"""What is the same message, and what is not.

Whatever an agent does, ids are appended: random conversations over sidecars that die, held to the record.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.conftest import CUSTOM_TOOLS, TOOLS, USER, Bench, asked, back, blocks_back, call_text, sampled, whole

from penstock.agent_loops import AgentConfig, ChatTokens
from penstock.gateway.prefix_tree import first_key, next_key

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [2.5, "ü"]}}}
SAID = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def key(message):
    return next_key(first_key([]), message)


def call(**changes):
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}


@pytest.mark.parametrize(
    "same",
    [
        {
            **SAID,
            "content": None,
            "refusal": None,
            "audio": None,
            "name": None,
            "annotations": [],
            "function_call": None,
        },
        call(function={"name": "f", "arguments": '{"b":[2.5,"\\u00fc"],"a":1}'}),
        call(index=0),
        call(function={"name": "f", "arguments": {"b": [2.5, "ü"], "a": 1.0}}),
        {**SAID, "content": [{"type": "text", "text": ""}]},
        {**SAID, "content": " \n"},
    ],
)
def test_a_call_however_it_is_spelled(same):
    assert key(same) == key(SAID)


@pytest.mark.parametrize(
    "same",
    [
        {**SAID, "content": "\n\n", "reasoning_content": "\nI add.\n"},
        {**SAID, "content": None, "reasoning_content": "I add."},
        {**SAID, "content": "<think>\nI add.\n</think>\n\n", "reasoning_content": "I add."},
    ],
)
def test_thinking_that_a_client_has_moved_is_the_same(same):
    thought = {**SAID, "content": "<think>\nI add.\n</think>\n\n"}
    assert key(same) == key(thought)
    assert key(SAID) != key(thought)
    assert key({**same, "content": "", "reasoning_content": "I subtract."}) != key(thought)


@pytest.mark.parametrize(
    "other",
    [
        {**SAID, "content": "x"},
        {**SAID, "tool_calls": []},
        call(id="call_2"),
        call(function={"name": "g", "arguments": "{}"}),
        call(function={"name": "f", "arguments": '{"a": 2}'}),
        call(function={"name": "f", "arguments": "{broken"}),
    ],
)
def test_another_call(other):
    assert key(other) != key(SAID)


def test_what_a_user_says_is_kept_to_the_letter():
    one, two = {"role": "user", "content": "x"}, {"role": "user", "content": "x "}
    assert key(one) != key(two)
    assert key({"role": "developer", "content": "x"}) == key({"role": "system", "content": "x"})
    image = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "url": "u"}]}
    assert key(image) != key(one)
    assert key({"role": "tool", "tool_call_id": "a", "content": "1"}) != key(
        {"role": "tool", "tool_call_id": "b", "content": "1"}
    )


def test_the_key_is_of_everything_said_and_of_the_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    one = {"role": "user", "content": "x"}
    assert next_key(first_key([]), one) != next_key(first_key(tools), one)
    assert next_key(next_key("k", one), SAID) != next_key(next_key("k", SAID), one)


words = st.text(alphabet="ab c.\n🙂<|>é", max_size=8)
FLOATS = '<tool_call>\n{"name": "calculator", "arguments": {"a": 5.0, "b": [-0.0, 9007199254740993]}}\n</tool_call>'
texts = st.one_of(
    words, st.just(call_text("1+2")), st.just(FLOATS), st.just("<think>\nhm\n</think>\n\nSo."), st.just("<tool_call>{")
)
systems = st.sampled_from(["", "Sub-agent one.", "Sub-agent two."])
steps = st.one_of(
    st.tuples(st.just("begin"), systems, st.booleans(), st.integers(1, 3)),
    st.tuples(st.just("extend"), st.integers(0, 50), words, st.integers(1, 3)),
    st.tuples(st.just("rewrite"), st.integers(0, 50), words, st.just(1)),
    st.tuples(st.just("retry"), st.integers(0, 50), st.booleans(), st.just(1)),
    st.tuples(st.just("side by side"), st.integers(0, 50), words, st.just(2)),
    st.tuples(st.just("kill"), st.none(), st.none(), st.just(0)),
)


class Agent:
    """Knows what it was told; does what a step says."""

    def __init__(self, bench: Bench, episode: Any, api: str) -> None:
        self.bench, self.episode, self.api = bench, episode, api
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []
        self.told: list[tuple[list[Any], dict[str, Any], Any]] = []
        """(messages before, fields, choice)"""
        self.back: dict[int, Any] = {}
        """id of a choice → the answer as this client sends it back."""
        self.answers: Counter[tuple[int, ...]] = Counter()

    async def ask(self, messages: list[Any], fields: dict[str, Any], retried: bool = False) -> None:
        call = await self.episode.answer(asked(messages, self.api, **fields), retried=retried)
        choices = await call.whole()
        chat = self.api == "chat"
        self.back |= {id(choice): back(choice) if chat else blocks_back(call.head, choice) for choice in choices}
        if (messages, fields) not in self.asked:
            self.asked.append((messages, fields))
        self.told += [(messages, fields, choice) for choice in choices if choice.token_ids]

    async def do(self, step: tuple[Any, ...]) -> None:
        kind, which, what, n = step
        if kind == "kill":
            self.episode = await self.bench.restart().find(self.episode.handle)
        elif kind == "begin" or not self.told:
            system = [{"role": "system", "content": which}] if which and isinstance(which, str) else []
            tools = TOOLS if self.api == "chat" else CUSTOM_TOOLS
            await self.ask([*system, USER], {**self._choices(n), **({"tools": tools} if what is True else {})})
        elif kind == "retry":
            messages, fields = self.asked[which % len(self.asked)]
            await self.ask(messages, fields, retried=what)
        else:
            await self._go_on(kind, which, what, n)

    async def _go_on(self, kind: str, which: int, what: str, n: int) -> None:
        messages, fields, choice = self.told[which % len(self.told)]
        said = [*messages, self.back[id(choice)], *self._reply(choice, what)]
        if kind == "rewrite":
            said = [*messages, *({"role": "user", "content": f"{word} {what}"} for word in ("summary", "go on"))]
        rest = {name: value for name, value in fields.items() if name != "n"}
        if kind == "side by side":
            other = [*messages, self.back[id(choice)], *self._reply(choice, what + "!")]
            await asyncio.gather(self.ask(said, rest), self.ask(other, rest))
        else:
            await self.ask(said, {**rest, **self._choices(n)})

    def _choices(self, n: int) -> dict[str, int]:
        return {"n": n} if self.api == "chat" else {}

    def _reply(self, choice: Any, what: str) -> list[Any]:
        ids = [call.call_id for call in choice.calls]
        if not ids:
            return [{"role": "user", "content": what or "?"}]
        if self.api == "chat":
            return [{"role": "tool", "tool_call_id": call_id, "content": what} for call_id in ids]
        return [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call_id, "content": what} for call_id in ids],
            }
        ]


def record(bench: Bench) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context fed, ids sampled) of every call of the model."""
    fed: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for request, answer in zip(bench.client.requests, bench.client.answers, strict=True):
        fed[tuple(request.token_ids), tuple(answer)] += 1
    return fed


def turns_of(segment: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    ids, at = whole(segment), len(segment.prompt_ids)
    bounds = [*segment.turn_starts.tolist(), len(segment.response_ids)]
    found = []
    for start, limit in itertools.pairwise(bounds):
        mask = segment.response_mask[start:limit].tolist()
        end = start + (mask.index(0) if 0 in mask else len(mask))
        found.append((tuple(ids[: at + start]), tuple(ids[at + start : at + end])))
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(steps, min_size=1, max_size=12), says=st.lists(texts, max_size=40))
@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_every_sampled_id_is_in_one_place_after_exactly_what_was_fed(
    chat_for: Callable[..., ChatTokens], api: str, plan: list[Any], says: list[str]
) -> None:
    bench = Bench(chat_for("qwen2_5"), AgentConfig(max_turns=100, max_response_tokens=100_000))
    bench.says.texts += says
    await bench.start()
    agent = Agent(bench, await bench.open(), api)
    for step in plan:
        await agent.do(step)
    if not agent.told:
        return
    trajectory = await bench.trajectory(agent.episode)
    for segment in trajectory.segments:
        for (fed, answer), (then, _) in itertools.pairwise(turns_of(segment)):
            assert then[: len(fed) + len(answer)] == fed + answer
    placed = Counter(turn for segment in trajectory.segments for turn in turns_of(segment))
    assert placed == record(bench)
    assert sum(len(sampled(segment)) for segment in trajectory.segments) == sum(map(len, bench.client.answers))
    for messages, _, choice in agent.told:
        assert any(answer == choice.token_ids for _, answer in placed), messages
    await bench.manager.close()
