"""The ids of one segment and what belongs to each: arrays that only ever grow.

prompt ids │ sampled │ observed │ sampled │ …        mask  1…1 │ 0…0 │ 1…1
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.transfer_queue import Ids


class TokenRow:
    """Every append costs what is appended, however long the row is: the hash is carried on, not made again."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = array("i", prompt_ids)
        """Prompt and response."""
        self.mask = bytearray()
        """Of the response: 1 = sampled."""
        self.turn_starts = array("i")
        self._prompt_len = len(prompt_ids)
        self._logprobs = array("f")
        self._spans = array("i")
        self._hash = xxhash.xxh3_64(little_endian(self.ids))

    @property
    def hash(self) -> int:
        """xxh3-64 of the int32 little-endian ids."""
        return self._hash.intdigest()

    @property
    def ends_sampled(self) -> bool:
        return bool(self.mask) and self.mask[-1] == 1

    def append_sampled(
        self, ids: Sequence[int], logprobs: Sequence[float], version_spans: Sequence[Sequence[int]]
    ) -> None:
        """One answer (N ids, N logprobs, spans over 0…N)."""
        start = len(self.mask)
        self.turn_starts.append(start)
        for version, first, end in version_spans:
            self._spans.extend((version, start + first, start + end))
        self._extend(ids, logprobs, b"\x01")

    def append_fed(self, ids: Sequence[int]) -> None:
        self._extend(ids, [0.0] * len(ids), b"\x00")

    def columns(self) -> dict[str, Any]:
        """The token fields of an `AgentLoopOutput`."""
        ids: Ids = np.array(self.ids, dtype=np.int32)
        return {
            "prompt_ids": ids[: self._prompt_len],
            "response_ids": ids[self._prompt_len :],
            "response_mask": np.array(self.mask, dtype=np.uint8),
            "response_logprobs": np.array(self._logprobs, dtype=np.float32),
            "version_spans": np.array(self._spans, dtype=np.int32).reshape(-1, 3),
            "turn_starts": np.array(self.turn_starts, dtype=np.int32),
        }

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], mark: bytes) -> None:
        new = array("i", ids)
        self.ids.extend(new)
        self.mask.extend(mark * len(new))
        self._logprobs.extend(logprobs)
        self._hash.update(little_endian(new))


def little_endian(ids: array[int] | Ids) -> bytes:
    """int32 little-endian bytes of ids, on every host: what context hashes are made of."""
    if sys.byteorder == "little":
        return ids.tobytes()
    return np.asarray(ids, dtype="<i4").tobytes()
