"""Real tokenizers with real templates, a tiny queue, and tools that remember what happened to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.agent_loops import AgentConfig, ChatTokens, WorkerServices, find_loop
from penstock.agent_loops.rewards import RewardFunction
from penstock.tools import BaseTool, ToolConfig, ToolResult
from penstock.tools.parsers import get_parser
from penstock.transfer_queue import JournalEntry, JournalMismatch, Lease, LeaseLost, Outcome, Task, Trajectory

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


class TinyQueue:
    """Leases each task once, keeps journals, lets a test kill a worker: a dead worker's calls change nothing."""

    def __init__(self, tasks: list[Task], min_version: int = 0) -> None:
        self.waiting = list(tasks)
        self.journals: dict[str, list[JournalEntry]] = {task.task_id: [] for task in tasks}
        self.held: dict[str, Lease] = {}
        self.fences: dict[str, int] = {}
        self.done: dict[str, Trajectory] = {}
        self.failed: list[tuple[str, Outcome]] = []
        self.released: list[str] = []
        self.waits: dict[str, float] = {}
        self.killed: set[str] = set()
        self.min_version = min_version
        self.max_attempts = 1

    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        count = 0 if worker in self.killed else count
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [self.lease(task) for task in taken]

    def lease(self, task: Task) -> Lease:
        fence = self.fences[task.task_id] = self.fences.get(task.task_id, 0) + 1
        journal = tuple(self.journals[task.task_id])
        lease = Lease(task.task_id, task, 0, len(self.failed), fence, self.min_version, journal)
        self.held[task.task_id] = lease
        return lease

    def expire_all(self, *killed: str) -> None:
        """As if every worker had been killed and its leases had run out; those in `killed` lease nothing more."""
        self.killed.update(killed)
        for episode_id, lease in list(self.held.items()):
            self.fences[episode_id] += 1
            del self.held[episode_id]
            self.waiting.append(lease.task)

    def _check(self, lease: Lease) -> None:
        if self.fences[lease.episode_id] != lease.fence:
            raise LeaseLost(lease.episode_id)

    async def renew(self, leases: list[Lease]) -> list[str]:
        return [lease.episode_id for lease in leases if self.fences[lease.episode_id] != lease.fence]

    async def journal(self, lease: Lease, entry: JournalEntry, position: int) -> None:
        self._check(lease)
        if (kept := len(self.journals[lease.episode_id])) != position:
            raise JournalMismatch(lease.episode_id, position, kept)
        self.journals[lease.episode_id].append(entry)

    async def adopt(self, episode_id: str, fence: int) -> Lease:
        return replace(self.held[episode_id], journal=tuple(self.journals[episode_id]))

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        self._check(lease)
        self.done[lease.episode_id] = trajectory
        del self.held[lease.episode_id]

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        self._check(lease)
        self.failed.append((lease.episode_id, outcome))
        del self.held[lease.episode_id]
        return False

    async def release(self, lease: Lease) -> None:
        self._check(lease)
        self.released.append(lease.episode_id)
        del self.held[lease.episode_id]
        self.waiting.append(lease.task)

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        self.waits[f"{role}:{cause}"] = self.waits.get(f"{role}:{cause}", 0.0) + seconds


@pytest.fixture
def tasks_of() -> Callable[..., list[Task]]:
    def make(count: int = 1, **fields: Any) -> list[Task]:
        plain = {"split": "train", "data_source": "sums", "ground_truth": "46"}
        messages = [{"role": "user", "content": "What is 12+34?"}]
        return [Task(f"train/{i:08d}", messages=messages, **{**plain, **fields}) for i in range(count)]

    return make


@pytest.fixture
def queue_of() -> Callable[..., TinyQueue]:
    return TinyQueue


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
