"""Runs INSIDE vLLM's workers: receives a broadcast under the pause, tensor by tensor into the model's own loading.

    join      in a thread, while decoding continues: this worker's place in the group
    receive   under the pause, in vLLM's own thread: buckets ── tensors ──► the model's `load_weights`, which vLLM's
              layer-wise reload copies into the parameters whenever a layer is complete

Its memory is three buckets, and the tensors of the layer under way. What came is compared with what the layers hold by
the first rows of each tensor: no copy of the others is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import torch

from penstock.rollout_server.engines.verify_loaded import Excerpts
from penstock.weight_sync import (
    JoinedBroadcast,
    Membership,
    Offer,
    WeightsBroken,
    WeightsUnreachable,
    state_of,
    whole_tensors,
)

NamedStream = Iterator[tuple[str, torch.Tensor]]


class ReceivedInPlace(NamedTuple):
    """Result of a broadcast that the model holds now."""

    state: str
    """`state_of` the tensors."""
    excerpts: Excerpts


class InPlaceWorker:
    """A worker has one. vLLM's thread calls it."""

    def __init__(self) -> None:
        self._joiner = ThreadPoolExecutor(1, thread_name_prefix="join")
        self._joining: Future[JoinedBroadcast] | None = None
        self._membership = Membership()

    def join(self, offer: Offer, worker: int, device: torch.device, done: Callable[[str], None]) -> None:
        """Returns at once; `done` is called in a thread with why it could not, empty if it could."""
        self.leave()
        self._joining = self._joiner.submit(_join, offer, worker, device, self._membership, done)

    def receive(self, reload: Callable[[NamedStream], None]) -> ReceivedInPlace:
        """`reload` replaces the parameters by the tensors of a stream, and leaves a sound model if that breaks off.

        Raises `WeightsUnreachable` where nothing was touched, `WeightsBroken` where the model holds no version.
        """
        joining, self._joining = self._joining, None
        if joining is None:
            raise WeightsUnreachable("this worker has joined no broadcast")
        excerpts = Excerpts()
        with closing(joining.result()) as joined:
            tensors = excerpts.noted(whole_tensors(joined.offer.tensors, joined.buckets()))
            try:
                first = list(islice(tensors, 1))
            except WeightsBroken as error:  # its tensor is not whole, so nothing was replaced
                raise WeightsUnreachable(str(error)) from error
            reload(_all_of(first, tensors))
            for _ in tensors:  # what the model's loading had no use for
                pass
        return ReceivedInPlace(state_of(joined.entries), excerpts)

    def leave(self) -> None:
        """Return a place that nothing was received in."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.add_done_callback(_leave)

    def shutdown(self) -> None:
        self.leave()
        self._joiner.shutdown(wait=False, cancel_futures=True)


def _all_of(first: list[tuple[str, torch.Tensor]], others: NamedStream) -> NamedStream:
    """Nothing is held of the first one once it was given out: it may be the largest."""
    while first:
        yield first.pop()
    yield from others


def _join(
    offer: Offer, worker: int, device: torch.device, membership: Membership, done: Callable[[str], None]
) -> JoinedBroadcast:
    problem = "this worker could not join the broadcast"
    try:
        joined = JoinedBroadcast(offer, membership, worker, device)
        problem = ""
        return joined
    except WeightsUnreachable as error:
        problem = str(error)
        raise
    finally:
        done(problem)


def _leave(joining: Future[JoinedBroadcast]) -> None:
    if not joining.cancelled() and joining.exception() is None:
        joining.result().close()
