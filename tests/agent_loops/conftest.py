"""Real tokenizers with real templates, the queue in memory, and tools that remember what happened to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from penstock.agent_loops import AgentConfig, ChatTokens, WorkerServices, find_loop
from penstock.agent_loops.rewards import RewardFunction
from penstock.testing import MemoryTransferQueue
from penstock.tools import BaseTool, ToolConfig, ToolResult
from penstock.tools.parsers import get_parser
from penstock.transfer_queue import JournalEntry, Lease, Limits, Outcome, Task, Trajectory

T = TypeVar("T")
TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "What is 12+34? Let me call the tool. The answer is 46. user assistant system tool result think",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>',
    "<tool_response>\n46\n</tool_response> # Tools You may call one or more functions to assist with the user query.",
]


@lru_cache
def _tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


@pytest.fixture(scope="session")
def tokenizer_for() -> Callable[[str], Any]:
    """By template name (a file in templates/) or by the template's own text."""

    def make(template: str) -> Any:
        file = TEMPLATES / f"{template}.jinja"
        return _tokenizer(file.read_text() if len(template) < 50 and file.is_file() else template)

    return make


@pytest.fixture(scope="session")
def chat_for(tokenizer_for: Callable[[str], Any]) -> Callable[..., ChatTokens]:
    def make(template: str = "qwen2_5", **settings: Any) -> ChatTokens:
        return ChatTokens(tokenizer_for(template), get_parser("hermes"), template_settings=settings)

    return make


class Calculator(BaseTool):
    """Keeps a running list, so that a repeated or forgotten call is seen."""

    name = "calculator"
    description = "Adds numbers."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.executed: list[str] = []
        self.open = 0
        self.created = 0
        self.released = 0
        self.entered = asyncio.Event()

    async def create(self, task: Task) -> Any:
        self.open += 1
        self.created += 1
        return SimpleNamespace(history=[], session_id=f"box-{self.created}")

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        self.entered.set()
        await asyncio.sleep(self.delay_s)
        self.executed.append(arguments["expression"])
        state.history.append(arguments["expression"])
        total = sum(int(term) for term in arguments["expression"].split("+"))
        return ToolResult(f"{total} (call {len(state.history)})")

    async def release(self, state: Any) -> None:
        self.open -= 1
        self.released += 1


@pytest.fixture
def calculator() -> Calculator:
    return Calculator()


class EpisodeQueue(MemoryTransferQueue):
    """The queue in memory with one episode per task, and its state by task id; a test may kill and rob workers."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.failed: list[Outcome] = []
        self.released: list[str] = []
        self.killed: set[str] = set()
        limits = Limits(1, max(1, len(tasks)), max_staleness=0, max_attempts=1000, max_lost_leases=1000)
        at_once(self.create_run(limits, "{}"))
        at_once(self.submit(tasks))
        self._state.version = 9
        """No test's client samples from a newer one."""

    @property
    def members(self) -> dict[str, Any]:
        return {name: group.members[0] for name, group in self._state.groups.items()}

    @property
    def done(self) -> dict[str, Trajectory]:
        done = [name for name, member in self.members.items() if member.payload is not None]
        read = at_once(self.read([f"{name}#0" for name in done]))
        return {one.task_id: replace(one, turn_rewards=tuple(one.turn_rewards)) for one in read}

    @property
    def journals(self) -> dict[str, list[JournalEntry]]:
        """Journals by task, also of completed episodes."""
        return {name: [entry for entry, _ in member.journal] for name, member in self.members.items()}

    @property
    def leased(self) -> list[str]:
        return [name for name, member in self.members.items() if member.state == "leased"]

    @property
    def waits(self) -> Mapping[str, float]:
        return self._waits

    def lease(self, task: Task) -> Lease:
        """The next worker's lease of `task`; an earlier one is lost."""
        if task.task_id not in self._state.groups:
            at_once(self.submit([task]))
        group = self._state.groups[task.task_id]
        if group.state == "queued":
            self._state.change(group, "admitted")
        return replace(self._lease("next", group, 0), task=task)

    def rewind(self, name: str, journal: Sequence[JournalEntry]) -> None:
        """Reopens a completed episode with this much of its journal."""
        self._state.change(self._state.groups[name], "admitted")
        member = self.members[name]
        member.state, member.payload, member.journal = "queued", None, [(entry, 0) for entry in journal]

    def expire_all(self, *killed: str) -> None:
        """Expires every lease. The workers in `killed` lease nothing more."""
        self.killed.update(killed)
        for name in self.leased:
            self.members[name].state, self.members[name].fence = "queued", self._state.new_fence()

    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        return await super().lease_episodes(worker, 0 if worker in self.killed else count, version)

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        journal = self.members[lease.task.task_id].journal
        await super().complete(lease, trajectory)
        self.members[lease.task.task_id].journal = journal

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        retried = await super().fail(lease, outcome)
        self.failed.append(outcome)
        return retried

    async def release(self, lease: Lease) -> None:
        if self.members[lease.task.task_id].fence == lease.fence:
            self.released.append(lease.task.task_id)
        await super().release(lease)


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call of the queue in memory, which never waits."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the queue in memory waited")


@pytest.fixture
def tasks_of() -> Callable[..., list[Task]]:
    def make(count: int = 1, **fields: Any) -> list[Task]:
        plain = {"split": "train", "data_source": "sums", "ground_truth": "46"}
        messages = [{"role": "user", "content": "What is 12+34?"}]
        return [Task(f"train/{i:08d}", messages=messages, **{**plain, **fields}) for i in range(count)]

    return make


@pytest.fixture
def queue_of() -> Callable[..., EpisodeQueue]:
    return EpisodeQueue


def call_text(*expressions: str) -> str:
    one = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
    return "\n".join(one.format(expression) for expression in expressions)


@pytest.fixture
def calling_policy(chat_for: Callable[..., ChatTokens]) -> Callable[..., Callable[[list[int]], list[int]]]:
    """A policy that calls the calculator `turns` times, then answers."""

    def make(turns: int = 1, calls: tuple[str, ...] = ("12+34",)) -> Callable[[list[int]], list[int]]:
        chat = chat_for()
        answer = chat.encode("The answer is 46.<|im_end|>")
        ask = chat.encode(call_text(*calls) + "<|im_end|>")

        def reply(context: list[int]) -> list[int]:
            results = chat.decode(context).count("<|im_start|>user\n<tool_response>")
            return answer if results >= turns else ask

        return reply

    return make


def score_text(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return float(str(ground_truth) in solution_str)


@pytest.fixture
def parts_of(chat_for: Callable[..., ChatTokens]) -> Callable[..., WorkerServices]:
    """Parts of a worker around a queue and a client, with the calculator as its tool."""

    def make(queue: Any, client: Any, tool: BaseTool | None = None, **fields: Any) -> WorkerServices:
        timeout_s = fields.pop("tool_timeout_s", 10.0)
        recipe_dir = fields.pop("recipe_dir", Path())
        config = fields.pop("config", None) or AgentConfig(max_response_tokens=1000)
        return WorkerServices(
            worker="worker-0",
            config=config,
            queue=queue,
            client=client,
            chat=chat_for(),
            tools={tool.name: tool} if tool else {},
            tool_configs={tool.name: ToolConfig(name=tool.name, timeout_s=timeout_s)} if tool else {},
            **{
                "find_loop": lambda name: find_loop(name, recipe_dir),
                "reward": RewardFunction(score_text),
                **fields,
            },
        )

    return make
