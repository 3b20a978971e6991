"""A reward model behind `penstock reward-server`."""

from __future__ import annotations

import json
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.base import Answer, BaseReward, Value
from penstock.agent_loops.rewards.service import ScoreService
from penstock.sandbox import Sandbox

TOKEN_VARIABLE = "PENSTOCK_REWARD_TOKEN"  # noqa: S105 - the name of a variable
FINAL, WHOLE, ALL = "final_text", "solution", "segments"


class RewardServer(BaseReward):
    """The server's score, unchanged. The metric `cut` counts conversations longer than the model's context."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        url: str,
        key_variable: str = TOKEN_VARIABLE,
        part: str = WHOLE,
        **limits: Any,
    ) -> None:
        """Raises `ValueError` where the token is not in the environment.

        Args:
            url: of the server, such as ``http://127.0.0.1:8900``.
            key_variable: environment variable that holds the server's token.
            part: `solution`, the last segment's response, `segments`, those of all, or `final_text`, the last turn.
            limits: see `ScoreService`: timeout_s, concurrency, per_minute, retries, cache_entries.
        """
        super().__init__(sandbox)
        self._part = checked_part(part)
        self._service = ScoreService("reward_server", f"{url.rstrip('/')}/score", key_variable, json.dumps, **limits)

    async def score(self, answer: Answer) -> Value:
        item = {"messages": [dict(message) for message in answer.messages], "answer": text_of(answer, self._part)}
        reply = json.loads(await self._service.ask({"items": [item]}))
        try:
            return {"score": float(reply["scores"][0]), "cut": float(reply["cut"][0])}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InfraFailure("reward_server", f"not a reward server's answer: {str(reply)[:200]}") from error

    async def close(self) -> None:
        await self._service.close()


def checked_part(part: str) -> str:
    if part not in (FINAL, WHOLE, ALL):
        raise ValueError(f"part is {part!r}: {WHOLE}, {ALL} or {FINAL}")
    return part


def text_of(answer: Answer, part: str) -> str:
    """Returns the last segment's response with tool results, the responses of all segments, or the last turn."""
    if part == ALL:
        return "\n\n".join(answer.extra_info.get(ALL, [answer.solution]))
    return str(answer.extra_info.get(FINAL, answer.solution)) if part == FINAL else answer.solution
