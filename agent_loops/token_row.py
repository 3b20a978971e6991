"""The arrays of one segment: ids, and mask, logprobs, versions and routed experts of the response."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.rollout_server import Generation
from penstock.transfer_queue import Ids, RoutedExperts

MOST = 1 << 20
"""Ids from here on (no vocabulary has them) get objects of their own."""


class TokenRow:
    """The ids of one segment with mask, logprobs, versions and, of a mixture, routed experts; appending costs time
    linear in the new ids alone."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = array("i", prompt_ids)
        """Prompt and response."""
        self.mask = bytearray()
        """Mask of the response: 1 = sampled."""
        self.turn_starts = array("i")
        self.routed_up_to = 0
        self._routed: list[tuple[int, RoutedExperts]] = []
        """(first position, rows), ascending and apart."""
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

    def append_sampled(self, answer: Generation) -> None:
        start = len(self.mask)
        if answer.routed_experts is not None:
            self._route(answer.routed_experts, len(self.ids) + len(answer.token_ids) - 1)
        self.turn_starts.append(start)
        for version, first, end in answer.version_spans:
            self._spans.extend((version, start + first, start + end))
        self._extend(answer.token_ids, b"\x01")
        self._logprobs.extend(answer.logprobs)

    def _route(self, rows: RoutedExperts, end: int) -> None:
        """Record routes of positions that have none. A known one stays: that pass sampled its token, or read it
        first.
        """
        first = max(end - len(rows), self.routed_up_to)
        if first < end:
            self._routed.append((first, rows[len(rows) - (end - first) :]))
            self.routed_up_to = end

    def _routed_experts(self) -> RoutedExperts | None:
        if not self._routed:
            return None
        _, some = self._routed[0]
        whole = np.zeros((len(self.ids), *some.shape[1:]), dtype=some.dtype)
        for first, rows in self._routed:
            whole[first : first + len(rows)] = rows
        return whole

    def append_fed(self, ids: Sequence[int]) -> None:
        self._extend(ids, b"\x00")
        self._logprobs.frombytes(bytes(self._logprobs.itemsize * len(ids)))

    def arrays(self) -> dict[str, Any]:
        """Copies of the arrays so far, by the names of `Segment`."""
        ids: Ids = np.array(self.ids, dtype=np.int32)
        return {
            "prompt_ids": ids[: self._prompt_len],
            "response_ids": ids[self._prompt_len :],
            "response_mask": np.array(self.mask, dtype=np.uint8),
            "response_logprobs": np.array(self._logprobs, dtype=np.float32),
            "version_spans": np.array(self._spans, dtype=np.int32).reshape(-1, 3),
            "turn_starts": np.array(self.turn_starts, dtype=np.int32),
            "routed_experts": self._routed_experts(),
        }

    def _extend(self, ids: Sequence[int], mark: bytes) -> None:
        new = array("i", ids)
        self.ids.extend(new)
        self.mask.extend(mark * len(new))
        self._hash.update(little_endian(new))


def little_endian(ids: array[int] | Ids) -> bytes:
    """int32 little-endian bytes of ids, on every host: what context hashes are made of."""
    if sys.byteorder == "little" and type(ids) is array and ids.itemsize == 4:
        return ids.tobytes()
    return np.asarray(ids, dtype="<i4").tobytes()


class SharedInts:
    """Token ids as Python ints, one object per id and process; grows to the vocabulary in use.

    A worker holds the context of each waiting episode as a list: 8 bytes per token with shared ints, else 40.
    """

    def __init__(self) -> None:
        self._ints: NDArray[Any] = np.arange(0, dtype=object)

    def of(self, ids: NDArray[np.int32]) -> list[int]:
        """`ids` as a list."""
        most = int(ids.max(initial=0))
        if most >= MOST or ids.min(initial=0) < 0:
            return [int(one) for one in ids]
        if most >= len(self._ints):
            self._ints = np.arange(1 << most.bit_length(), dtype=object)
        shared: list[int] = self._ints.take(ids).tolist()
        return shared


SHARED = SharedInts()
