"""The place of a rank where one copy of the model spans several ranks.

    rank = ((stage · R + replica) · C + context) · T + tensor         megatron-core's order, "tp-cp-dp-pp"

A replica is one whole copy of the model on T · C · P ranks, all of which hold the same episodes; R replicas share out a
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

RANKS_FILE_VARIABLE = "PENSTOCK_RANKS_FILE"
"""Names the file. Without it ranks meet at torchrun's store, which listens on every address of its machine and asks
for no proof of identity: over several machines there is no other."""
CORES_VARIABLE = "PENSTOCK_TRAIN_CORES"
"""CPU cores that a placement reserved for the ranks of this machine together; unset: all that they may run on."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    replica: int
    """Which copy of the model the rank belongs to, from 0."""
    replicas: int
    is_replica_leader: bool
    """First of its replica: does once what concerns its rows."""
    reports: bool
    """True if its numbers count for its replica: it is in the last stage, which has logprobs and loss."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The split of one copy of the model. By default it is not: every rank is its own replica."""

    tensor: int = 1
    """T: ranks that share each matrix."""
    context: int = 1
    """C: ranks that share each row's tokens."""
    stages: int = 1
    """P: groups of layers on ranks of their own."""
    replicate: int = 1
    """H: sets of consecutive ranks of which each holds all shards of weights, gradients and moments. Who trains which
    rows does not hang on it: the replicas of one set and of all sets share out the batch."""
    expert: int = 1
    """E: consecutive ranks that share out a mixture's experts. They train other rows, as if it were 1."""

    @property
    def ranks(self) -> int:
        """The ranks that hold the same rows."""
        return self.tensor * self.context * self.stages

    def place(self, rank: int, world: int) -> RankPlace:
        """Raises `ValueError` where `world` ranks are no whole number of replicas."""
        replicas, rest = divmod(world, self.ranks)
        if rest or not replicas:
            raise ValueError(f"{world} ranks are no whole number of replicas of {self.ranks} ranks")
        higher, among = divmod(rank, self.tensor * self.context)
        stage, replica = divmod(higher, replicas)
        return RankPlace(
            replica, replicas, is_replica_leader=not among and not stage, reports=not among and stage == self.stages - 1
        )

    def reporters(self, world: int) -> list[int]:
        """[R] the rank that reports for each replica."""
        return [rank for rank in range(world) if self.place(rank, world).reports]
