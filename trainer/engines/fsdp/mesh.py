"""Over which ranks FSDP's weights lie, and who shares this rank's tokens.

rank = tensor + T · (context + C · replica)            `layout`, without stages
     = expert + E · (shard + shards · replicate)       of a mixture's experts (`experts`)

shards    ranks of one place in their tensor groups: each weight, or each part of a split one, lies over them
          under `RankLayout.replicate`, over the n-th part of them, and each part holds the same (HSDP)
tensor    the T ranks that share out each matrix
context   the C ranks that share out the tokens of each pack
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.trainer.engines.fsdp.context import ContextGroup
from penstock.trainer.engines.fsdp.experts import DIMENSION
from penstock.trainer.ranks.distributed import Ranks
from penstock.trainer.ranks.layout import RankLayout


class Mesh:
    """Creating one is a collective. Use `ranks.own(mesh_of)`: all models of a process lie over the same groups."""

    def __init__(self, layout: RankLayout, device_type: str, timeout: timedelta) -> None:
        self._tensor_size = layout.tensor
        self.replicate = layout.replicate
        """Sets of ranks that hold all shards."""
        self.size = dist.get_world_size() // layout.tensor
        """Ranks over which gradients are averaged."""
        sizes = {"replicate": self.replicate, "shards": self.size // self.replicate, "tensor": layout.tensor}
        dimensions = {name: size for name, size in sizes.items() if size > 1 or name != "tensor"}
        self._whole = _device_mesh(dimensions, device_type, timeout)
        self._experts: DeviceMesh | None = None
        if layout.expert > 1:
            over = {"replicate": self.replicate, "shards": sizes["shards"] // layout.expert, DIMENSION: layout.expert}
            self._experts = _device_mesh(over, device_type, timeout)
        self.context = _context(layout, timeout) if layout.context > 1 else None

    def close(self) -> None:
        """Release the groups. DTensor's caches keep every device mesh as long as the process lives, and a mesh keeps
        its groups: their threads could abort the ending interpreter."""
        for mesh in (self._whole, self._experts):
            getattr(mesh, "_pg_registry", {}).clear()

    @property
    def shards(self) -> DeviceMesh:
        """[replicate, shards], or [shards] if there is one set: consecutive ranks hold all shards."""
        return self._whole["shards"] if self.replicate == 1 else self.sets

    @property
    def sets(self) -> DeviceMesh:
        """[replicate, shards], of one set too."""
        return self._whole if self._tensor_size == 1 else self._whole["replicate", "shards"]

    @property
    def tensor(self) -> DeviceMesh | None:
        return None if self._tensor_size == 1 else self._whole["tensor"]

    @property
    def expert(self) -> DeviceMesh | None:
        """[expert]: the ranks that share out a mixture's experts."""
        return self._experts and self._experts[DIMENSION]

    @property
    def expert_shards(self) -> DeviceMesh:
        """Return `shards` of the ranks that have the same part of the experts."""
        assert self._experts is not None
        return self._experts["shards"] if self.replicate == 1 else self.expert_sets

    @property
    def expert_sets(self) -> DeviceMesh:
        assert self._experts is not None
        return self._experts["replicate", "shards"]


def mesh_of(ranks: Ranks) -> Mesh:
    return Mesh(ranks.layout, ranks.device.type, ranks.timeout)


def _device_mesh(sizes: Mapping[str, int], device_type: str, timeout: timedelta) -> DeviceMesh:
    mesh = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [_group_along(mesh, axis, timeout) for axis in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=tuple(sizes))


def _group_along(mesh: torch.Tensor, axis: int, timeout: timedelta) -> dist.ProcessGroup:
    """Process group of this rank along `axis`. `init_device_mesh` would give it the backend's timeout of 10 or 30
    minutes. A collective."""
    if mesh.shape[axis] == mesh.numel():
        group = dist.group.WORLD
    elif mesh.shape[axis] == 1:
        group = dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
    else:
        members = mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis])
        group, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)
    assert group is not None
    return group


def _context(layout: RankLayout, timeout: timedelta) -> ContextGroup:
    """Every rank makes all groups, in one order."""
    among = layout.tensor * layout.context
    starts = [replica * among + t for replica in range(dist.get_world_size() // among) for t in range(layout.tensor)]
    members = [[start + c * layout.tensor for c in range(layout.context)] for start in starts]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    assert group is not None
    return ContextGroup(group, dist.get_rank(group), layout.context)
