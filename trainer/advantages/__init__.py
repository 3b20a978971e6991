"""Advantage estimators: from rewards, and values if there is a critic, to one advantage per sampled token.

One file each. An estimator sees the whole groups of one rank and is a pure function; what needs numbers of all ranks
(whitening) it asks for in what it returns. Every segment of an episode gets its share of the episode's advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.common import Registry
from penstock.trainer.grouping import add_at_last, sum_by
from penstock.trainer.lazy_torch import Tensor, torch


@dataclass(frozen=True, slots=True)
class Episodes:
    """The input of an estimator. E episodes, U turns, N sampled tokens; turns and tokens in order of time, episode by
    episode. All numbers float64, all indices int64."""

    rewards: Tensor
    """[E] outcome, with the overlong penalty where one is set"""
    group: Tensor
    """[E] the group of each episode; groups are whole, their members of unequal number"""
    turn_rewards: Tensor
    """[U] what the turn itself was rewarded with, times trainer.turn_reward_weight; 0 where nothing came"""
    turn_episode: Tensor
    """[U]"""
    turn_state: Tensor
    """[U] equal where the turn answered the same thing: what was fed right before it"""
    token_turn: Tensor
    """[N]"""
    token_rewards: Tensor
    """[N] −coefficient · KL to the reference policy under trainer.kl.in_reward; 0 otherwise"""
    trained: Tensor
    """[N] bool; the others carry no loss, but are part of the episode"""
    values: Tensor | None = None
    """[N] the critic's, of the context before the token"""
    process_rewards: Tensor | None = None
    """[N] of the implicit reward model, where the estimator needs one"""
    greedy: Tensor | None = None
    """[E] reward of the greedy episode of the same task"""
    turn_path: Tensor | None = None
    """[U] equal where episodes are the same from their task to the last token that the turn sampled"""

    @property
    def token_episode(self) -> Tensor:
        """[N]"""
        return self.turn_episode[self.token_turn]

    @property
    def returns(self) -> Tensor:
        """[E] everything that the episode was rewarded with: outcome, turns, tokens."""
        turns = sum_by(self.turn_rewards, self.turn_episode, len(self.rewards))
        return self.rewards + turns + sum_by(self.token_rewards, self.token_episode, len(self.rewards))

    @property
    def lengths(self) -> Tensor:
        """[E] sampled tokens"""
        return torch.bincount(self.token_episode, minlength=len(self.rewards)).double()

    def rewards_by_token(self) -> Tensor:
        """[N] each reward at its place: a turn's on its last token, the outcome on the episode's last one."""
        rewards = self.token_rewards.clone()
        add_at_last(rewards, self.turn_rewards, self.token_turn)
        add_at_last(rewards, self.rewards, self.token_episode)
        return rewards

    def rewards_by_turn(self) -> Tensor:
        """[U] the same for turns."""
        rewards = self.turn_rewards + sum_by(self.token_rewards, self.token_turn, len(self.turn_rewards))
        add_at_last(rewards, self.rewards, self.turn_episode)
        return rewards

    def only(self, chosen: Tensor) -> Episodes:
        """chosen [E] bool → these episodes alone, with their turns and tokens. Groups keep their numbers."""
        turns = chosen[self.turn_episode]
        tokens = turns[self.token_turn]
        parts = {"values": tokens, "process_rewards": tokens, "greedy": chosen, "turn_path": turns}
        optional = {name: getattr(self, name) for name in parts}
        return Episodes(
            rewards=self.rewards[chosen],
            group=self.group[chosen],
            turn_rewards=self.turn_rewards[turns],
            turn_episode=_renumbered(self.turn_episode[turns], chosen),
            turn_state=self.turn_state[turns],
            token_turn=_renumbered(self.token_turn[tokens], turns),
            token_rewards=self.token_rewards[tokens],
            trained=self.trained[tokens],
            **{name: None if tensor is None else tensor[parts[name]] for name, tensor in optional.items()},
        )

    def per_episode(self, advantages: Tensor, *, whiten: bool = False) -> Advantages:
        """[E] → the same advantage for all tokens of an episode"""
        return Advantages(advantages[self.token_episode], whiten=whiten)

    def per_turn(self, advantages: Tensor) -> Advantages:
        """[U] → the same advantage for all tokens of a turn"""
        return Advantages(advantages[self.token_turn])


def _renumbered(index: Tensor, chosen: Tensor) -> Tensor:
    """Map an index [M] of all turns or episodes to their numbers among the `chosen` [K] bool ones → [M]."""
    return (chosen.cumsum(0) - 1)[index]


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of an estimator."""

    tokens: Tensor
    """[N] float64"""
    returns: Tensor | None = None
    """[N] the targets of the critic; None without a critic"""
    whiten: bool = False
    """Shift and scale to mean 0 and variance 1 over the trained tokens of all ranks."""


Estimator = Callable[..., Advantages]
"""``(Episodes, *, setting=default, …) → Advantages``; settings come from trainer.advantage_options."""

ADVANTAGES: Registry[Estimator] = Registry("advantage estimator", package="penstock.trainer.advantages")


def needs_of(function: Callable[..., object]) -> frozenset[str]:
    """Return the needs of an estimator: ``groups`` (two members or more), ``values`` (a critic), ``implicit`` (an
    implicit reward model), ``greedy`` (a greedy member of each group); of a loss ``sequences`` and ``groups``.
    """
    return frozenset(getattr(function, "needs", ()))


def state_groups(batch: Episodes, depth: int) -> Tensor:
    """[U] equal where turns of one group have the same last `depth` states; a turn with fewer is alone."""
    members = [batch.group[batch.turn_episode]]
    turns = torch.arange(len(batch.turn_state))
    first = torch.searchsorted(batch.turn_episode, batch.turn_episode)
    for back in range(depth):
        place = turns - back
        alone = place < first
        members.append(torch.where(alone, turns, batch.turn_state[place.clamp(min=0)]))
        members.append(alone.long())
    _, index = torch.stack(members).unique(dim=1, return_inverse=True)
    return index
