"""A run that lives in the test: a real redis queue, trained on by nobody, recorded by the trainer's own recorder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.deploy import RunConnection
from penstock.trainer import ModelLimits, Stopping, TrainerConfig, make_step_batch
from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Batch,
    DataCursor,
    JournalEntry,
    JournalKind,
    Lease,
    Limits,
    Outcome,
    OutcomeKind,
    RedisServer,
    RedisTransferQueue,
    Segment,
    ServerInfo,
    Task,
    Trajectory,
    TransferQueueConfig,
    WeightUpdate,
)

MODEL = Path(__file__).parents[2] / "recipes" / "calculator" / "model"
PROMPT = "<|im_start|>user\nWhat is {}*7?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{{"name": "python", "arguments": {{"code": "print({}*7)"}}}}\n</tool_call><|im_end|>'
ANSWER = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LIMITS = Limits(group_size=4, groups_per_step=1, max_staleness=2, max_attempts=1)


class LivingRun:
    """`async with` it; `step()` is one step of all parts together."""

    def __init__(self, runs_dir: Path, name: str) -> None:
        from tokenizers import Tokenizer

        self.name, self.root = name, runs_dir / name
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.redis = RedisServer(runs_dir.parent / f"redis-of-{name}", "only-for-this-test")
        self.steps = 0

    async def __aenter__(self) -> LivingRun:
        from penstock.trainer import Recorder

        await self.redis.start()
        link = RunConnection(self.redis.url, self.name, "only-for-this-test", "writes")
        self.queue: RedisTransferQueue = await link.connect(TransferQueueConfig())
        await self.queue.create_run(LIMITS, "config: true")
        self.root.mkdir(parents=True)
        (self.root / "config.yaml").write_text(
            f"model: {MODEL}\nmax_staleness: 2\ngroups_per_step: 1\ngroup_size: 4\nagent: {{workers: 1}}\n"
            "rollout: {servers: 2, max_concurrent: 8}\ntrainer: {steps: 50, ranks: 1}\n"
        )
        (self.root / "connect.env").write_text(link.shell_lines())
        self.recorder = await asyncio.to_thread(Recorder, self.root, str(MODEL), 8, Stopping(TrainerConfig().stop))
        self.beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.beating.cancel()
        await asyncio.wait([self.beating])
        self.recorder.close()
        (self.root / "connect.env").unlink(missing_ok=True)
        await self.queue.close()
        await self.redis.stop()

    async def step(self) -> None:
        """One group through the whole queue."""
        step = self.steps
        await self.train({})
        await self.queue.add_wait("trainer", "batch", 0.5)
        await self.queue.report_update(WeightUpdate("rollout-0", step + 1, 0.002, 0.03, 0.01, 5))

    async def train(self, manifest: Mapping[str, Any]) -> None:
        """`step` up to the new version, whose weights are where `manifest` says."""
        step = self.steps
        await self._submit(step)
        for lease in await self.queue.lease_episodes("agent-0", LIMITS.group_size, max(0, step - 1)):
            await self.queue.complete(lease, self._trajectory(lease, step))
        batch = await self.queue.lease_batch(step)
        assert isinstance(batch, Batch), batch
        await asyncio.to_thread(self._record, batch, await self.queue.read(batch.groups[0]))
        await self.queue.publish_version(Announcement(step + 1, manifest))
        self.steps += 1

    async def _beat(self) -> None:
        """Two servers, one of them a version behind, as they tell the registry every second."""
        while True:
            await self._tell_servers()
            await asyncio.sleep(1.0)

    async def _tell_servers(self) -> None:
        await self.queue.heartbeat(ServerInfo("rollout-0", "http://127.0.0.1:1", self.steps, 5, True, 900))
        behind = ServerInfo("rollout-1", "http://127.0.0.1:2", max(0, self.steps - 1), 2, True, 300)
        refusal = f"version {self.steps} refused, version {behind.version} stays: no"
        await self.queue.heartbeat(replace(behind, refused=self.steps, refusal=refusal))

    async def bury(self, reason: str) -> str:
        """A group that is given up; returns its first dead letter."""
        await self._submit(self.steps)
        for lease in await self.queue.lease_episodes("agent-0", LIMITS.group_size, self.steps):
            ids = np.array(self._ids("I will look."), dtype=np.int32)
            spans, logprobs = np.array([[0, 0, len(ids)]], dtype=np.int32), np.full(len(ids), -0.1, dtype=np.float32)
            entry = JournalEntry(JournalKind.SAMPLED, 3, 7, ids, logprobs, spans, {"finish_reason": "stop"})
            await self.queue.journal(lease, entry, 0)
            await self.queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, reason, "sandbox"))
        (letter, *_) = await self.queue.dead_letters()
        return letter.episode_id

    async def _submit(self, number: int) -> None:
        at = await self.queue.cursor()
        task = Task(f"train/{at.index:08d}", "train", [{"role": "user", "content": f"{number}*7"}], "calculator", "1")
        await self.queue.submit([task], cursor=DataCursor(0, at.index + 1))

    def _trajectory(self, lease: Lease, step: int) -> Trajectory:
        right = lease.member % 2 == 0
        last = f"{step * 7 if right else step + 7}<|im_end|>"
        parts = [(1, CALL.format(step)), (0, ANSWER.format(step * 7)), (1, last)]
        return Trajectory(
            lease.episode_id,
            lease.task.task_id,
            [self._segment(PROMPT.format(step), parts, max(0, step - 1), step)],
            float(right),
            COMPLETED,
            num_turns=2,
            metrics={"tool_calls": 1.0, "latency_s": 1.2},
            extra={"agent": "ToolAgentLoop", "worker": "agent-0", "attempt": 0, "trace": TRACE},
            data_source="calculator",
        )

    def _segment(self, prompt: str, parts: Sequence[tuple[int, str]], first: int, last: int) -> Segment:
        """The first part was sampled at version `first`, later ones at `last`."""
        ids = [self._ids(text) for _, text in parts]
        mask = np.concatenate([np.full(len(one), mask, np.uint8) for one, (mask, _) in zip(ids, parts, strict=True)])
        starts = np.cumsum([0, *map(len, ids)])
        sampled = [i for i, (kind, _) in enumerate(parts) if kind]
        spans = [[first if i == 0 else last, starts[i], starts[i + 1]] for i in sampled]
        noise = -np.random.default_rng(len(mask)).exponential(0.6, len(mask))
        return Segment(
            np.array(self._ids(prompt), dtype=np.int32),
            np.concatenate(ids).astype(np.int32),
            mask,
            np.where(mask == 1, noise, 0.0).astype(np.float32),
            np.array(spans, dtype=np.int32),
            np.array([starts[i] for i in sampled], dtype=np.int32),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _record(self, batch: Batch, trajectories: Sequence[Trajectory]) -> None:
        import torch

        made = make_step_batch(batch, [0], trajectories, 2, ModelLimits(4096, 10_000))
        self.recorder.step(made, step_numbers(batch.step), torch.tensor([1.0, -1.0, 1.0, -1.0]))


TRACE = [["model", "", 0.0, 0.5], ["tool", "python", 0.5, 0.3], ["model", "", 0.8, 0.3], ["reward", "", 1.15, 0.05]]


def step_numbers(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl of a run that learns."""
    return {
        "step": step,
        "version": step + 1,
        "reward": 1 - 0.8 * 0.9**step,
        "reward_std": 0.4,
        "response_length_mean": 40.0 + step,
        "sampled_length_mean": 30.0 + step,
        **{f"length_decile/{number}": number * (20 + step) for number in range(1, 11)},
        **{f"over_age_share/{number}": number * 0.01 for number in range(1, 11)},
        "num_turns_mean": 2.0,
        "kl_k3": 0.001 * step,
        "entropy": 1.5 * 0.95**step,
        "staleness_mean": min(step, 2) * 0.6,
        "staleness_max": min(step, 2),
        "staleness_tokens": {str(age): 100 // (age + 1) for age in range(min(step, 2) + 1)},
        "logprob_abs_diff_mean": 1e-4,
        "logprob_abs_diff_max": 1e-2,
        "effective_sample_share": 0.98,
        "tokens_per_s": 2000.0 + 10 * step,
        "wall_s": 2.0,
        "wait_s": 0.5,
        "train_s": 1.5,
        "publish_s": 0.01,
        "grad_norm": 0.5,
    }
