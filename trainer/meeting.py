"""How ranks find each other: in a file where all are on one machine, else at torchrun's address."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

RANKS_FILE_VARIABLE = "PENSTOCK_RANKS_FILE"
"""Names the file. Without it ranks meet at torchrun's store, which listens on every address of its machine and asks
nobody who they are: over several machines there is no other."""


def own_store() -> dist.Store | None:
    """For ranks of one machine; a rank without torchrun is alone. None: torchrun's environment says where to go."""
    import torch.distributed as dist

    if "RANK" not in os.environ:
        return dist.HashStore()
    file = os.environ.get(RANKS_FILE_VARIABLE)
    return dist.FileStore(file, int(os.environ["WORLD_SIZE"])) if file else None
