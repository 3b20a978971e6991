from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.until import until

from penstock.agent_loops import BLOCKING, AgentConfig, AgentLoopBase, Worker, WorkerJob, WorkerStopped, loop_watch
from penstock.testing import FakeClient
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import RunContext, ServerInfo

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def worker_of(parts_of):
    def make(queue, client, tool=None, *, name="w", lease_ttl_s=15.0, max_failures_in_a_row=20, **fields):
        parts = parts_of(queue, client, tool, **fields)
        run = RunContext(queue, model="", lease_ttl_s=lease_ttl_s)
        job = WorkerJob(name, run, parts.config, client, max_failures_in_a_row=max_failures_in_a_row)
        return Worker(job, parts)

    return make


@contextlib.asynccontextmanager
async def running(worker):
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, WorkerStopped):
            await task


async def test_worker_respects_concurrency_and_counts(worker_of, queue_of, tasks_of, calling_policy, calculator):
    queue = queue_of(tasks_of(40))
    config = AgentConfig(concurrency=7, max_response_tokens=1000)
    worker = worker_of(queue, FakeClient(calling_policy(), latency_s=0.01), calculator, config=config)
    most, busiest, value = 0, 0, worker.stats.metrics.registry.get_sample_value
    async with running(worker):
        while len(queue.done) < 40 or not value("penstock_agent_waited_seconds_total", {"cause": "admission"}):
            await asyncio.sleep(0.005)
            most = max(most, len(queue.leased))
            busiest = max(busiest, value("penstock_agent_in_flight"))
            assert value("penstock_agent_concurrency_limit") == 7
    assert most == 7
    assert 0 < busiest <= 7
    assert all(trajectory.reward == 1.0 for trajectory in queue.done.values())
    assert (calculator.created, calculator.open) == (40, 0)
    assert queue.waits["agent:admission"] > 0
    assert value("penstock_agent_episodes_total", {"outcome": "completed"}) == 40
    assert value("penstock_agent_tool_call_seconds_count", {"tool": "calculator"}) == 40
    counts = [value(f"penstock_agent_{name}_seconds_count") for name in ("episode", "model_call", "reward")]
    assert counts == [40, 80, 40]
    assert value("penstock_agent_model_call_seconds_sum") > 0
    assert value("penstock_agent_in_flight") == 0


async def test_worker_resumes_episode_of_dead_worker(worker_of, queue_of, tasks_of, calling_policy, calculator):
    """Killed while the second model call is out: the first call and its tools are in the journal."""
    queue = queue_of(tasks_of(3))
    policy = calling_policy(turns=2)
    answered = {"first": 0}

    class Hanging(FakeClient):
        async def generate(self, request):
            if self.version == 0 and "tool_response" in texts(request.token_ids):
                await asyncio.sleep(60)
            answered["first"] += 1
            return await super().generate(request)

    def texts(ids):
        return worker._services.chat.decode(ids)[len("<|im_start|>") :].split("# Tools")[-1]

    first_client = Hanging(policy)
    worker = worker_of(queue, first_client, calculator)
    dead = asyncio.create_task(worker.run())
    await until(lambda: len(calculator.executed) == 3 and all(len(j) == 2 for j in queue.journals.values()))
    queue.expire_all("w")  # from here on nothing that the dead worker does counts
    second_client = FakeClient(policy, version=1)
    async with running(worker_of(queue, second_client, calculator, name="next")):
        await until(lambda: len(queue.done) == 3)
    dead.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await dead
    assert answered["first"] == 3
    assert len(second_client.requests) == 6  # turns two and three of each episode, never turn one
    for trajectory in queue.done.values():
        assert trajectory.extra["replayed_calls"] == 1
        assert trajectory.extra["replayed_tool_turns"] == 1
        assert [span[0] for span in trajectory.segments[0].version_spans.tolist()] == [0, 1, 1]
        assert trajectory.extra["tool_results"] == ["46 (call 1)", "46 (call 2)"]
    assert calculator.open == 0


async def test_sigterm_hands_every_lease_back_with_its_journal(
    worker_of, queue_of, tasks_of, calling_policy, calculator
):
    calculator.delay_s = 60
    queue = queue_of(tasks_of(5))
    async with running(worker_of(queue, FakeClient(calling_policy()), calculator, tool_timeout_s=90)):
        await until(lambda: calculator.created == 5)
    assert sorted(queue.released) == sorted(queue.journals)
    assert queue.leased == []
    assert calculator.open == 0
    assert all(len(journal) == 1 for journal in queue.journals.values())


async def test_a_lost_lease_stops_its_episode_only(worker_of, queue_of, tasks_of, calling_policy, calculator):
    calculator.delay_s = 60
    queue = queue_of(tasks_of(2))
    worker = worker_of(queue, FakeClient(calling_policy()), calculator, tool_timeout_s=90, lease_ttl_s=0.1)
    async with running(worker):
        await until(lambda: calculator.created == 2)
        queue.lease(tasks_of()[0])
        await until(lambda: len(worker.episodes.running) == 1)
        assert list(worker.episodes.running) == ["train/00000001#0"]
        assert calculator.open == 1
    assert queue.released == ["train/00000001"]


async def test_a_worker_that_leases_its_own_lost_episode_runs_it_once(
    worker_of, queue_of, tasks_of, calling_policy, calculator
):
    calculator.delay_s = 60
    queue = queue_of(tasks_of(1))
    worker = worker_of(queue, FakeClient(calling_policy()), calculator, tool_timeout_s=90, lease_ttl_s=1e6)
    async with running(worker):
        await until(lambda: calculator.created == 1)
        queue.expire_all()
        await until(lambda: calculator.created == 2 and calculator.open == 1)
        assert len(worker.episodes) == 1
    assert queue.released == ["train/00000000"]
    assert calculator.open == 0


async def test_failures_in_a_row_stop_the_worker_with_their_cause(worker_of, queue_of, tasks_of):
    def broken(context):
        raise ConnectionError("port 8000 refused")

    queue = queue_of(tasks_of(100))
    config = AgentConfig(concurrency=4)
    with pytest.raises(WorkerStopped, match=r"infrastructure failures in a row.*rollout: ConnectionError: port 8000"):
        await worker_of(queue, FakeClient(broken), config=config).run()
    assert 20 <= len(queue.failed) <= 28
    assert queue.leased == []


async def test_worker_without_server_leases_nothing(worker_of, queue_of, tasks_of, calling_policy):
    queue, client = queue_of(tasks_of(1)), FakeClient(calling_policy(turns=0), version=None)
    worker = worker_of(queue, client)
    async with running(worker):
        await until(lambda: worker.stats.waits_s.get("server", 0.0) > 0.1)
        assert queue.leased == []
        assert not queue.done
        client.version = 0
        await until(lambda: queue.done)
    assert queue.waits["agent:server"] > 0.1


async def test_servers_asleep_in_the_trainers_turn_are_waited_for(worker_of, queue_of, calling_policy):
    class Asleep(FakeClient):
        refused = 0

        async def servers(self):
            return [ServerInfo("s0", "http://s0", 0, accepting=False, asleep=True)]

    for client, is_broken in ((FakeClient(calling_policy(), version=None), True), (Asleep(None, version=None), False)):
        worker = worker_of(queue_of([]), client)
        worker._server_seen = time.monotonic() - 1e6
        await worker._admit()
        with pytest.raises(WorkerStopped, match="no rollout server") if is_broken else contextlib.nullcontext():
            worker._stop_if_broken()


async def test_a_queue_that_is_gone_ends_the_worker(worker_of, queue_of, calling_policy):
    from penstock.transfer_queue import QueueUnavailable

    queue = queue_of([])

    async def gone(worker, count, version):
        raise QueueUnavailable("redis did not answer for 60 s")

    queue.lease_episodes = gone
    with pytest.raises(QueueUnavailable, match="60 s"):
        await worker_of(queue, FakeClient(calling_policy())).run()


async def test_an_episode_that_a_full_queue_refuses_is_handed_back(worker_of, queue_of, tasks_of, calling_policy):
    """A store without memory refuses journals and takes leases back. Lost four times, an episode is a dead letter."""
    from penstock.transfer_queue import QueueUnavailable

    queue, refusals = queue_of(tasks_of(1)), 5
    journal = queue.journal

    async def full(lease, entry, position):
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise QueueUnavailable("journal: no answer from redis for 60 s: OOM")
        await journal(lease, entry, position)

    queue.journal = full
    async with running(worker_of(queue, FakeClient(calling_policy(turns=0)))):
        await until(lambda: queue.done)
    assert queue.released == ["train/00000000"] * 5
    assert queue.members["train/00000000"].lost_by == []


def test_importing_the_worker_imports_no_torch():
    code = "import sys, penstock.agent_loops.worker; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE)}, timeout=60)


async def test_worker_adapts_concurrency_to_refusals(worker_of, queue_of, tasks_of, calling_policy, monkeypatch):
    class Loaded(FakeClient):
        refused = 0
        pressed = True

        async def servers(self):
            self.refused += self.pressed
            return [ServerInfo("s", "http://s", 0)]

    monkeypatch.setattr("penstock.agent_loops.worker.ADAPT_S", 0.02)
    monkeypatch.setattr("penstock.agent_loops.concurrency.HOLD_S", 0.05)
    client = Loaded(calling_policy(turns=0), latency_s=0.02)
    queue = queue_of(tasks_of(5000))  # more than end meanwhile on a busy machine
    worker = worker_of(queue, client, config=AgentConfig(concurrency=16, max_response_tokens=1000))
    async with running(worker):
        await until(lambda: worker.concurrency.limit <= 2 and len(queue.leased) <= 2)
        client.pressed = False
        await until(lambda: len(queue.leased) == 16)
    assert not queue.failed


async def test_worker_drain_tears_down_and_leaves_states(worker_of, queue_of, tasks_of, calculator):
    happened = []

    class Careful(AgentLoopBase):
        def setup(self, task):  # plain code: in a thread
            happened.append(("setup", threading.current_thread() is not threading.main_thread()))

        async def run(self, task):
            segment = self.chat.start(task.messages)
            await self.llm.generate(segment)
            await self.tools.call_all([ToolCall("calculator", {"expression": "1+1"})])
            happened.append(("in the middle", True))
            await asyncio.sleep(60)

        async def teardown(self):
            await asyncio.sleep(0.05)
            happened.append(("teardown", True))

    async def leave(state):
        happened.append(("left", True))

    calculator.leave = leave
    queue = queue_of(tasks_of(1))
    worker = worker_of(queue, FakeClient(lambda context: [5, 2]), calculator, find_loop=lambda name: Careful)
    async with running(worker) as task:
        await until(lambda: ("in the middle", True) in happened)
        queue.lease(tasks_of()[0])
        await worker.episodes.renew()  # the lease is lost, and the worker is told to stop while the episode tears down
        task.cancel()
    assert happened == [("setup", True), ("in the middle", True), ("teardown", True), ("left", True)]
    assert calculator.released == 0


async def test_a_lease_that_ends_with_its_completed_episode_is_not_lost(
    queue_of, worker_of, tasks_of, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_of(tasks_of(1))
    worker = worker_of(queue, FakeClient(lambda context: [1]))
    complete, answered = queue.complete, asyncio.Event()

    async def slowly_answered(lease, trajectory):
        await complete(lease, trajectory)
        await worker.episodes.renew()
        answered.set()
        await asyncio.sleep(0)

    queue.complete = slowly_answered
    async with running(worker):
        await answered.wait()
        await until(lambda: not worker.episodes.running)
    assert "was lost" not in caplog.text


SLOW_LOOP = """import time
from pathlib import Path

from penstock.agent_loops import AgentLoopBase


def parses_slowly():
    for _ in range(3000):
        if Path(__file__).with_name("named").exists():
            break
        time.sleep(0.01)


class Slow(AgentLoopBase):
    async def run(self, task):
        segment = self.chat.start(task.messages)
        await self.llm.generate(segment)
        parses_slowly()
        return segment.output(reward=1.0)
"""


async def test_worker_names_blocking_call_of_user_loop(worker_of, queue_of, tasks_of, tmp_path, monkeypatch):
    """The loop blocks until its line is named, at most for half a minute."""
    (tmp_path / "slow_loop.py").write_text(SLOW_LOOP)

    def warn(message, blocked, place):
        if f"{tmp_path}/slow_loop.py:" in place and place.endswith(" in parses_slowly"):
            (tmp_path / "named").touch()

    monkeypatch.setattr(loop_watch.log, "warning", warn)
    queue = queue_of(tasks_of(1, agent_name="slow_loop.py:Slow"))
    async with running(worker_of(queue, FakeClient(lambda context: [5, 2]), recipe_dir=tmp_path)):
        await until(lambda: queue.done)
    assert (tmp_path / "named").exists()
    waits = (await queue.status()).waits_s
    assert any(wait.startswith(f"agent:{BLOCKING}{tmp_path}/slow_loop.py:") for wait in waits)
