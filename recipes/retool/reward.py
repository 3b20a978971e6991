"""ReTool's reward: is the answer that the model's last turn gives equal to the reference?

    reward = 1 where math-verify finds them equal, else 0

Feng et al. 2025, "ReTool" (arXiv:2504.11536), section 2.3. Only the last turn counts. What a tool printed, or what
stands in a call, is not an answer: a policy that lets Python print the result and stops there earns nothing.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.agent_loops.rewards import Answer, Maths, Value
from penstock.sandbox import Sandbox

BOX = "\\boxed{"
CALLS = ("<tool_call>", "<tool_response>")
"""A turn that holds one of these calls a tool instead of answering (parser hermes)."""


class LastTurn(Maths):
    """Settings of `maths`, and `boxed`. Metrics: `answered`, and those of `maths`."""

    def __init__(
        self, sandbox: Sandbox | None = None, *, boxed: bool = True, wrong: float = 0.0, **settings: float
    ) -> None:
        """
        Args:
            boxed: only what stands in ``\\boxed{}`` is an answer; False: without a box the last number or formula.
            wrong: reward of a wrong answer, and of none.
        """
        super().__init__(sandbox, wrong=wrong, **settings)  # type: ignore[arg-type]
        self._boxed = boxed
        self._nothing = wrong

    async def score(self, answer: Answer) -> Value:
        """Returns the score of the last turn, which is in the row's `extra_info["final_text"]`."""
        text = said_at_last(str(answer.extra_info.get("final_text", answer.solution)), boxed=self._boxed)
        if text is None:
            return {"score": self._nothing, "answered": 0.0}
        value = await super().score(replace(answer, solution=text))
        assert not isinstance(value, float)
        return {**value, "answered": 1.0}


def said_at_last(turn: str, *, boxed: bool) -> str | None:
    """The part of a turn that is its answer; None if it gives none."""
    if any(mark in turn for mark in CALLS):
        return None
    start = turn.rfind(BOX)
    if start >= 0:
        return turn[start:]
    return None if boxed else turn or None
