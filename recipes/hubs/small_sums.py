"""A small environment in the shape of verifiers' hub: sums, with a second try."""

from __future__ import annotations

from typing import Any

import verifiers.legacy as vf
from datasets import Dataset


class TwoTries(vf.MultiTurnEnv):
    """Says once that an answer is wrong."""

    async def env_response(self, messages: Any, state: Any, **further: Any) -> Any:
        return [vf.UserMessage(content="That is wrong. Again.")]

    @vf.stop
    async def answered(self, state: Any) -> bool:
        return any(state["answer"] in text_of(step["completion"]) for step in state["trajectory"])


def text_of(messages: Any) -> str:
    return "".join(str(getattr(one, "content", "") or "") for one in messages)


def right(completion: Any, answer: str, **further: Any) -> float:
    return float(answer in text_of(completion))


def load_environment(terms: int = 2) -> vf.Environment:
    rows = [
        {
            "question": "What is " + "+".join(str(number + place) for place in range(terms)) + "?",
            "answer": str(sum(number + place for place in range(terms))),
        }
        for number in range(64)
    ]
    return TwoTries(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=2)
