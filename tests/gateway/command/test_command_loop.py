"""`agent.loop: command`: a program in a box is the agent; what it samples is recorded token for token."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from tests.gateway.command.conftest import BACKENDS, CLIENT
from tests.sandbox.harbor.conftest import BOXES as HARBOR_BOXES
from tests.sandbox.harbor.conftest import WriteTask, write_task

from penstock.agent_loops import AgentConfig, Episode, LoadError, find_loop
from penstock.agent_loops.rewards import RewardFunction
from penstock.sandbox import make_sandbox
from penstock.testing import FakeClient
from penstock.tools import ToolConfig, make_tools
from penstock.transfer_queue import Outcome, OutcomeKind

__all__ = ["write_task"]
pytestmark = pytest.mark.bwrap
ROOT = Path(__file__).parents[3]
WITH_TOOLS = """
messages = [user(open(sys.argv[1]).read() if len(sys.argv) > 1 else "What is 12+34?")]
while True:
    message = ask(messages, tools=TOOLS)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "46"} for call in message["tool_calls"]]
open("answer.txt", "w").write(message["content"])
print("done in", os.getcwd())
"""


@pytest.mark.parametrize("sandbox", BACKENDS, indirect=True)
async def test_an_agent_with_tools_is_one_segment_token_for_token(run, chat_for, calling_policy):
    client = FakeClient(calling_policy(turns=2))
    ended = await run(WITH_TOOLS, client=client, settings={"collect": ["answer.txt", "none.txt"]})
    assert ended.outcome == Outcome(OutcomeKind.COMPLETED)
    (segment,) = ended.trajectory.segments
    whole = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    assert [whole[: len(request.token_ids)] for request in client.requests] == [r.token_ids for r in client.requests]
    assert "<tool_response>\n46\n</tool_response>" in chat_for().decode(segment.response_ids)
    assert (ended.trajectory.reward, ended.trajectory.num_turns) == (1.0, 3)
    assert ended.trajectory.metrics["calls"] == 3
    assert ended.trajectory.metrics["tool_calls"] == 2
    assert ended.trajectory.metrics["token_mismatches"] == 0
    assert ended.program["files"] == {"answer.txt": "The answer is 46."}
    assert (ended.program["exit_code"], ended.program["limit"]) == (0, None)
    assert ended.program["stdout"].startswith("done in /tmp/")


async def test_both_apis_streams_and_the_list_of_models(run, calling_policy):
    code = """
key = os.environ["ANTHROPIC_API_KEY"]
headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "Content-Type": "application/json"}
body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 50, "messages": [user("What is 12+34?")]}
def messages(path, **more):
    url = os.environ["ANTHROPIC_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps({**body, **more}).encode(), headers)
    return urllib.request.urlopen(request, timeout=120).read().decode()
print(json.loads(messages("/v1/messages"))["content"][0]["text"])
print(messages("/v1/messages", stream=True).count("event: content_block_delta") > 0)
print(json.loads(messages("/v1/messages/count_tokens"))["input_tokens"] > 0)
chat = json.dumps({"model": "policy", "stream": True, "messages": [user("again")]}).encode()
bearer = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
base = os.environ["OPENAI_BASE_URL"]
print(urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", chat, bearer)).read()[-14:])
print(post("/responses", {"model": "policy", "input": "What is 12+34?"})["output"][0]["content"][0]["text"])
listed = urllib.request.urlopen(urllib.request.Request(base + "/models", headers=bearer))
print([model["id"] for model in json.load(listed)["data"]])
"""
    ended = await run(code, client=FakeClient(calling_policy(turns=0)))
    assert ended.program["stdout"].splitlines() == [
        "The answer is 46.",
        "True",
        "True",
        "b'data: [DONE]\\n\\n'",
        "The answer is 46.",
        "['policy']",
    ], ended.program["stderr"]
    assert ended.trajectory.num_turns == 4


async def test_the_command_line_its_files_and_its_environment_are_filled_in(run):
    code = """
ask([user("Hi")])
print(json.dumps([sys.argv[1:], sys.stdin.read(), os.environ["WHERE"], "ANTHROPIC_API_KEY" in os.environ,
    open("notes/plan.txt").read(), open("given.txt").read(), os.environ["HOME"] == os.path.dirname(sys.argv[0])]))
"""
    settings = {
        "command": 'exec python3 "$HOME/agent.py" {prompt} {instance_id} "${HOME:+set}" \'{"a": 1}\'',
        "environment": {"WHERE": "{folder} of {task_id}", "ANTHROPIC_API_KEY": ""},
        "stdin": "{prompt}!",
    }
    settings["files"] = {"~/agent.py": CLIENT + code, "notes/plan.txt": "for {model}"}
    ended = await run(settings=settings, row={"instance_id": "a'b; exit 3", "files": {"given.txt": "of the row"}})
    argv, stdin, where, has_key, plan, given, at_home = json.loads(ended.program["stdout"])
    assert argv == ["What is 12+34?", "a'b; exit 3", "set", '{"a": 1}']
    assert stdin == "What is 12+34?!"
    assert where.endswith(" of train/00000000")
    assert (has_key, plan, given, at_home) == (False, "for policy", "of the row", True)


async def test_the_reward_function_sees_what_the_program_left(run):
    seen = {}

    def score(data_source, solution_str, ground_truth, extra_info):
        seen.update(extra_info["program"])
        return float(extra_info["program"]["files"]["answer.txt"] == "46")

    code = 'ask([user("Hi")]); open("answer.txt", "w").write("46")'
    ended = await run(code, settings={"collect": ["answer.txt"]}, reward=RewardFunction(score))
    assert ended.trajectory.reward == 1.0
    assert seen["exit_code"] == 0


BADLY = {
    "never asks": ("sys.exit(0)", {}, "infra_error", "agent", "the program never asked the model"),
    "another model": (
        'post("/chat/completions", {"model": "gpt-x", "messages": [user("Hi")]})',
        {}, "infra_error", "agent", "'gpt-x' does not exist",
    ),
    "a wrong key": (
        'post("/chat/completions", {"model": "policy", "messages": [user("Hi")]}, key="wrong")',
        {}, "infra_error", "agent", "401",
    ),
    "a field that is refused": (
        'ask([user("Hi")]); ask([user("Ho")], logit_bias={"1": 5})',
        {}, "policy_error", "", "logit_bias",
    ),
    "no such program": ("", {"command": ["/no/such/program"]}, "infra_error", "agent", "No such file"),
    "no such placeholder": ("", {"command": ["python3", "{promt}"]}, "infra_error", "loop", "prompt"),
    "no such setting": ("", {"colect": []}, "infra_error", "loop", "colect"),
    "fails": ('ask([user("Hi")]); sys.exit("no idea")', {}, "policy_error", "", "no idea"),
    "fails, and is tried again": (
        'ask([user("Hi")]); sys.exit("no idea")',
        {"on_failure": "infra_error"}, "infra_error", "agent", "no idea",
    ),
    "dies": ('ask([user("Hi")]); os.kill(os.getpid(), 9)', {}, "policy_error", "", "ended with -9"),
    "never ends": ('ask([user("Hi")]); time.sleep(600)', {"max_seconds": 15.0}, "truncated", "", "deadline"),
    "never begins": ("time.sleep(600)", {"max_seconds": 2.0}, "infra_error", "agent", "never asked the model; it was"
        " ended by its time limit of 2 s, agent.settings.max_seconds: raise it"),
    "floods its output": (
        'ask([user("Hi")])\nwhile True: print("x" * 100_000)',
        {}, "policy_error", "", "limit output",
    ),
    "floods its endpoint": (
        'while True: ask([user("Hi")])',
        {"max_requests": 6}, "policy_error", "", "more than 6 ",
    ),
    "floods its endpoint with what is no request": (
        'import socket\nask([user("Hi")])\nhost, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")\n'
        'while True: socket.create_connection((host, int(port))).sendall(b"no request")',
        {"max_requests": 6}, "policy_error", "", "more than 6 connections",
    ),
    "sends too much": (
        'while True: ask([user("Hi")], user="x" * 500_000)',
        {"max_request_mb": 1}, "policy_error", "", "more than 1048576 bytes",
    ),
    "takes all memory": (
        'ask([user("Hi")]); grabbed = [bytearray(b"x" * (16 << 20)) for _ in range(100)]',
        {}, "policy_error", "", "memory",
    ),
    "forks": (
        'ask([user("Hi")])\n'
        "try:\n  while True: os.fork() or time.sleep(600)\n"
        "except OSError: ask([user('Ho')]); print('full')",
        {}, "completed", "", "",
    ),
}  # fmt: skip
"""What an agent may do wrong: (code, settings, outcome, component, words of the cause)."""


@pytest.mark.parametrize("case", BADLY)
async def test_each_bad_end_is_a_typed_outcome_with_its_cause(run, calling_policy, case):
    code, settings, kind, component, words = BADLY[case]
    ended = await run(code, client=FakeClient(calling_policy(turns=0)), settings=settings)
    assert (ended.outcome.kind, ended.outcome.component) == (kind, component), ended.outcome
    assert words in ended.outcome.reason
    if kind == "infra_error":
        assert ended.trajectory is None
    else:
        assert ended.trajectory.reward is not None
        assert ended.trajectory.num_turns >= 1


@pytest.mark.parametrize(
    ("timeout_s", "deadline_s", "cause"),
    [(10, 300.0, "10 s, the task's agent.timeout_sec"), (600, 12.0, "10.8 s, 0.9 of agent.episode_deadline_s")],
)
async def test_a_slow_start_names_the_limit_that_ended_it(
    run, write_task: WriteTask, timeout_s: int, deadline_s: float, cause: str
):
    folder = write_task(toml=f"[agent]\ntimeout_sec = {timeout_s}\n")
    boxes = make_sandbox(HARBOR_BOXES, "tests-slow-start")
    ended = await run(
        settings={"command": ["sh", "-c", "echo no terminal >&2; exec sleep 600"]},
        row={"instance_id": folder.name, "harbor_task": str(folder)},
        tool=make_tools([ToolConfig(name="harbor")], boxes)["shell"],
        config={"episode_deadline_s": deadline_s},
    )
    await boxes.close()
    assert ended.outcome.component == "agent", ended.outcome
    words = rf"ended by its time limit of {re.escape(cause)}: raise it .* first start .*no terminal"
    assert re.search(words, ended.outcome.reason), ended.outcome


async def test_a_budget_that_is_used_up_truncates_and_ends_who_asks_on(run, calling_policy):
    code = 'n = 0\nwhile True:\n    n += 1\n    ask([user(f"part {n}")])'
    ended = await run(code, client=FakeClient(calling_policy(turns=0)), config={"max_turns": 2})
    assert ended.outcome == Outcome(OutcomeKind.TRUNCATED, "turns")
    assert ended.trajectory.num_turns == 2
    assert "budget was used up" in ended.program["cause"]


async def test_our_failure_ends_the_program_at_once_and_is_no_reward(run):
    def broken(context):
        raise OSError("no server")

    code = """
while True:
    try:
        ask([user("Hi")])
    except urllib.error.HTTPError:
        time.sleep(0.1)
"""
    ended = await run(code, client=FakeClient(broken))
    assert (ended.outcome.kind, ended.outcome.component) == ("infra_error", "rollout")
    assert "no server" in ended.outcome.reason


class Stops(FakeClient):
    """Answers so often; then it says so and waits."""

    def __init__(self, reply, answers):
        super().__init__(reply)
        self.left, self.stopped = answers, asyncio.Event()

    async def generate(self, request):
        if self.left == 0:
            self.stopped.set()
            await asyncio.Event().wait()
        self.left -= 1
        return await super().generate(request)


async def killed(run, code, client, queue):
    """The first worker's run, up to the question that is not answered any more."""
    first = asyncio.create_task(run(code, client=client, queue=queue))
    await client.stopped.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    client.left = 100


async def test_another_worker_goes_on_from_the_journal_without_sampling_again(run, calling_policy, queue_of, tasks_of):
    client, queue = Stops(calling_policy(turns=2), answers=2), queue_of(tasks_of())
    await killed(run, WITH_TOOLS, client, queue)
    assert len(client.requests) == 2
    ended = await run(WITH_TOOLS, client=client, queue=queue)
    assert len(client.requests) == 3
    assert (ended.outcome.kind, ended.trajectory.num_turns, len(ended.trajectory.segments)) == ("completed", 3, 1)
    assert ended.trajectory.extra["replayed_calls"] == 2
    assert ended.trajectory.metrics["restarts"] == 0


async def test_what_is_answered_from_the_journal_is_not_beyond_the_budget(run, calling_policy, queue_of, tasks_of):
    """That the budget was used up is known from the start of the second run."""
    queue, client, used_up = queue_of(tasks_of()), FakeClient(calling_policy(turns=0)), asyncio.Event()
    code, config = "for n in range(13): ask([user(f'part {n}')])", {"max_turns": 12}
    keep = queue.journal

    async def journal(lease, entry, position):
        await keep(lease, entry, position)
        if "truncated" in str(entry.data) and not used_up.is_set():
            used_up.set()
            await asyncio.Event().wait()

    queue.journal = journal
    first = asyncio.create_task(run(code, client=client, queue=queue, config=config))
    await used_up.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    ended = await run(code, client=client, queue=queue, config=config)
    assert (ended.outcome.kind, ended.program["exit_code"], ended.program["cause"]) == ("truncated", 0, "")
    assert (ended.trajectory.num_turns, ended.trajectory.metrics["restarts"]) == (12, 0)
    assert len(client.requests) == 12


async def test_a_program_that_asks_otherwise_the_second_time_starts_afresh_at_once(run, queue_of, tasks_of):
    code = 'messages = [user(f"it is {time.time()}")]\nfor _ in range(3):\n    messages += [ask(messages), user("on")]'
    answers = itertools.count(5)
    client, queue = Stops(lambda context: [next(answers), 2], answers=2), queue_of(tasks_of())
    await killed(run, code, client, queue)
    ended = await run(code, client=client, queue=queue)
    (segment,) = ended.trajectory.segments
    assert segment.response_ids[segment.response_mask == 1].tolist() == [7, 2, 8, 2, 9, 2]
    assert ended.trajectory.metrics["restarts"] == 1
    assert ended.queue.failed == []


async def test_the_example_of_the_page(run, calling_policy):
    page = (ROOT / "docs/extend/loop.md").read_text().partition("## Any program as the agent")[2]
    example = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    settings = example["agent"]["settings"]
    ended = await run(client=FakeClient(calling_policy(turns=0)), settings=settings)
    assert (ended.outcome.kind, ended.program["stdout"]) == ("completed", "The answer is 46.\n")


def test_the_loop_is_registered_and_needs_a_sandbox(tmp_path):
    assert find_loop("command", tmp_path).needs_sandbox
    assert not find_loop("tool_agent", tmp_path).needs_sandbox
    with pytest.raises(LoadError, match="command"):
        find_loop("comand", tmp_path)


async def test_without_a_box_that_can_be_served_the_cause_names_the_backend(parts_of, queue_of, tasks_of):
    from penstock.testing import FakeSandbox

    config = AgentConfig(loop="command", settings={"command": ["true"]})
    for sandbox, words in ((None, "the run has none"), (FakeSandbox(), "bwrap")):
        queue = queue_of(tasks_of())
        parts = parts_of(queue, FakeClient(lambda context: [5, 2]), config=config, sandbox=sandbox)
        outcome = await Episode(parts, queue.lease(tasks_of()[0])).run()
        assert (outcome.kind, outcome.component) == ("infra_error", "sandbox")
        assert words in outcome.reason
