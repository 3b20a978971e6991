"""Minibatches whose loss or gradient was not finite, kept for people as one file per rank.

    bad_batches/step_000012_0_rank_00.safetensors      (step, minibatch, rank)

The tensors are what the rank trained: `I.FIELD` of pack I, and `targets.FIELD`. The metadata of the file's header has
the loss, the gradient norm, the divisor, the ids of the episodes by `Pack.episode`, and the settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.trainer.loss import Targets
from penstock.trainer.packing import Pack

MOST_FILES = 3
"""Files that a rank keeps in a run."""
logger = logging.getLogger(__name__)


def keep_bad_batch(path: Path, packs: Sequence[Pack], targets: Targets, about: Mapping[str, str]) -> None:
    """Writes `path`, unless its folder has `MOST_FILES` of this rank; a write that fails is logged, and the run goes
    on."""
    parts = {f"{number}.": pack for number, pack in enumerate(packs)} | {"targets.": targets}
    tensors = {f"{prefix}{one.name}": getattr(part, one.name) for prefix, part in parts.items() for one in fields(part)}
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    rank = path.stem.rpartition("_")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(list(path.parent.glob(f"*_rank_{rank}.safetensors"))) >= MOST_FILES:
            return
        save_file(on_host, path, dict(about))
        logger.error("the bad batch is kept in %s", path)
    except (OSError, SafetensorError) as error:
        logger.error("the bad batch is not kept in %s: %s: %s", path, type(error).__name__, error)
