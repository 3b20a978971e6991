"""A small environment in the shape of verifiers' hub: sums, with a second try."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums", "TwoTries"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    terms: int = 2


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(64):
            numbers = [number + place for place in range(self.config.terms)]
            question = f"What is {'+'.join(map(str, numbers))}?"
            yield Sum(SumData(prompt=question, answer=str(sum(numbers))), self.config.task)


class TwoTriesConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, max_turns=2)


class TwoTries(vf.Env[TwoTriesConfig]):
    """Says once that an answer is wrong."""

    async def run(self, task: Sum, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            if not reply.terminated and task.data.answer not in reply.last_reply:
                await talk.turn("That is wrong. Again.")
