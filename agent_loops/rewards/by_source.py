"""One reward per `data_source`: what a mixed dataset needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.agent_loops.rewards.base import Answer, BaseReward, Value
from penstock.agent_loops.rewards.config import RewardChoice
from penstock.agent_loops.rewards.names import choice_for, make_reward
from penstock.sandbox import Sandbox


class BySource(BaseReward):
    """The recipe's own choices are made at once: a mistake is seen before the first episode. verl's when used."""

    def __init__(self, own: Mapping[str, str | RewardChoice], recipe_dir: Path, sandbox: Sandbox | None = None) -> None:
        """Raises `LoadError`."""
        super().__init__(sandbox)
        self._own = own
        self._recipe_dir = recipe_dir
        self._made: dict[str, BaseReward] = {}
        for data_source in own:
            self._reward_for(data_source)

    def check(self, data_sources: Iterable[str]) -> None:
        """Raises `LoadError` where one of them has no reward, or one that cannot be made."""
        for data_source in sorted(data_sources):
            self._reward_for(data_source)

    async def score(self, answer: Answer) -> Value:
        return await self._reward_for(answer.data_source).score(answer)

    async def close(self) -> None:
        for reward in self._made.values():
            await reward.close()

    def _reward_for(self, data_source: str) -> BaseReward:
        """Sources of one choice share the reward, and with it its processes, cache and limits."""
        choice = choice_for(data_source, self._own)
        key = choice.model_dump_json()
        if key not in self._made:
            self._made[key] = make_reward(choice, self._recipe_dir, self.sandbox)
        return self._made[key]
