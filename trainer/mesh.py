"""Over which ranks FSDP's weights lie, and who shares this rank's tokens.

rank = tensor + T · (context + C · replica)            `layout`, without stages

shards    ranks of one place in their tensor groups: each weight, or each part of a split one, lies over them
tensor    the T ranks that share out each matrix
context   the C ranks that share out the tokens of each pack
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.trainer.context import Context
from penstock.trainer.layout import Layout


class Mesh:
    """Making one is a collective; `Ranks.mesh` keeps it, so that all models of a process lie over the same groups."""

    def __init__(self, layout: Layout, device_type: str, timeout: timedelta) -> None:
        self._tensor_size = layout.tensor
        self.size = dist.get_world_size() // layout.tensor
        """Ranks over which gradients are averaged."""
        self._whole = self._device_mesh(device_type)
        self.context = _context(layout, timeout) if layout.context > 1 else None

    def _device_mesh(self, device_type: str) -> DeviceMesh:
        if self._tensor_size == 1:
            return init_device_mesh(device_type, (self.size,), mesh_dim_names=("shards",))
        return init_device_mesh(device_type, (self.size, self._tensor_size), mesh_dim_names=("shards", "tensor"))

    def close(self) -> None:
        """Let go of the groups. DTensor's caches keep every device mesh as long as the process lives, and a mesh keeps
        its groups: their threads could abort the ending interpreter."""
        getattr(self._whole, "_pg_registry", {}).clear()

    @property
    def shards(self) -> DeviceMesh:
        return self._whole if self._tensor_size == 1 else self._whole["shards"]

    @property
    def tensor(self) -> DeviceMesh | None:
        return None if self._tensor_size == 1 else self._whole["tensor"]


def _context(layout: Layout, timeout: timedelta) -> Context:
    """Every rank makes all groups, in one order."""
    among = layout.tensor * layout.context
    starts = [replica * among + t for replica in range(dist.get_world_size() // among) for t in range(layout.tensor)]
    members = [[start + c * layout.tensor for c in range(layout.context)] for start in starts]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    assert group is not None
    return Context(group, dist.get_rank(group), layout.context)
