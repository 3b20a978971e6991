"""Where a rank stands when one copy of the model spans several ranks.

    rank = tensor + T · (context + C · (replica + R · stage))         megatron-core's order, "tp-cp-dp-pp"

A replica is one whole copy of the model on T · C · P ranks, all of which are given the same episodes; R replicas share
out a batch. One rank of each speaks for it: what is added up over ranks counts once. It is of the last stage, where
logprobs and loss are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    replica: int
    """Which copy of the model the rank belongs to, from 0."""
    replicas: int
    speaks: bool
    """This rank's numbers count for its replica."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one copy of the model is split. By default it is not: every rank is a replica of its own."""

    tensor: int = 1
    """T: ranks that share each matrix."""
    context: int = 1
    """C: ranks that share each row's tokens."""
    stages: int = 1
    """P: groups of layers on ranks of their own."""

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor * self.context * self.stages

    def place(self, rank: int, world: int) -> Place:
        """Raises `ValueError` where `world` ranks are no whole number of replicas."""
        replicas, rest = divmod(world, self.ranks_per_replica)
        if rest or not replicas:
            raise ValueError(f"{world} ranks are no whole number of replicas of {self.ranks_per_replica} ranks")
        among, higher = rank % (self.tensor * self.context), rank // (self.tensor * self.context)
        stage, replica = divmod(higher, replicas)
        return Place(replica, replicas, speaks=among == 0 and stage == self.stages - 1)

    def speakers(self, world: int) -> list[int]:
        """[R] the rank that speaks for each replica."""
        return [rank for rank in range(world) if self.place(rank, world).speaks]
