"""Conversations as token ids, in one file that all ranks read and a resumed run reads again.

    ids     int32 [T]      of all conversations, one after the other
    mask    uint8 [T]      1 = the model has to write it: the loss is on these alone
    bounds  int64 [D + 1]  conversation d is ids[bounds[d] : bounds[d + 1]]

A safetensors file: nothing is pickled, and a row is read without the rest. A conversation whose history the template
rewrites is several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.common import write_atomically
from penstock.transfer_queue import Segment


class ConversationFile:
    """Reads a file that `write_conversations` wrote. Closed with the process: the file stays mapped."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="numpy")
        self._ids, self._mask = (self._file.get_slice(name) for name in ("ids", "mask"))
        self._bounds = self._file.get_tensor("bounds")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def tokens(self, number: int) -> int:
        return int(self._bounds[number + 1] - self._bounds[number])

    def segment(self, number: int) -> Segment:
        """Return a segment as of an episode, with logprobs 0 and version 0."""
        start, end = (int(bound) for bound in self._bounds[number : number + 2])
        ids, mask = self._ids[start:end], self._mask[start:end]
        first = int(np.flatnonzero(mask)[0])
        length = end - start - first
        return Segment(
            prompt_ids=ids[:first],
            response_ids=ids[first:],
            response_mask=mask[first:],
            response_logprobs=np.zeros(length, dtype=np.float32),
            version_spans=np.array([[0, 0, length]], dtype=np.int32),
            turn_starts=np.zeros(1, dtype=np.int32),
        )


def write_conversations(path: Path, segments: Sequence[Segment]) -> None:
    """Whole or not at all; durable when it returns. One segment at least, each with a prompt and a sampled token."""
    from safetensors.numpy import save

    lengths = [len(one.prompt_ids) + len(one.response_ids) for one in segments]
    ids = [part for one in segments for part in (one.prompt_ids, one.response_ids)]
    fed = (np.zeros(len(one.prompt_ids), dtype=np.uint8) for one in segments)
    masks = [part for prompt, one in zip(fed, segments, strict=True) for part in (prompt, one.response_mask)]
    tensors: dict[str, NDArray[Any]] = {
        "ids": np.concatenate(ids, dtype=np.int32),
        "mask": np.concatenate(masks, dtype=np.uint8),
        "bounds": np.cumsum([0, *lengths], dtype=np.int64),
    }
    write_atomically(path, save(tensors), durable=True)
