"""The wire between the trainer's ranks: rank 0 asks, the others answer, one question at a time.

[kind, version, begin, end]    rank 0 to a rank, int64; of `Kind.JOIN` the bytes of its place follow
[held]                         its answer: whether it has that version; if so, what was asked for follows
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from penstock.weight_sync.broadcast.shards import Superseded

logger = logging.getLogger(__name__)
PING_S = 5.0
"""Rank 0 says that often that it is there: the others wait for it with a deadline."""
CLOSE_S = 60.0


class Kind(IntEnum):
    """Kinds of questions."""

    PING = 0
    BUCKET = 1
    """A range of the rank's copies."""
    STOP = 2
    MARKS = 3
    SUMMARY = 4
    JOIN = 5
    """The group in which it sends."""
    SEND = 6
    """Command to send its part of a range of the stream, in its group."""
    LEAVE = 7


class RankWire:
    """One rank's end."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
        """`group`: gloo, of these ranks, used for nothing else."""
        self.lock = threading.Lock()
        """Rank 0 holds it over each question and its answer."""
        self._rank, self._world, self._group = rank, world, group
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, rank: int, world: int, timeout: timedelta) -> RankWire:
        """Open the wire between the ranks of the process group; a collective."""
        return cls(rank, world, dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None)

    def start(self, answer: Callable[[], None]) -> None:
        """A thread: rank 0's keeps the others waiting, theirs `answer`."""
        if self._world > 1:
            work = self._ping if self._rank == 0 else answer
            self._thread = threading.Thread(target=work, name="weights of this rank", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the other ranks' threads from rank 0; the other ranks wait for that, `CLOSE_S` at most."""
        self._closed.set()
        if self._thread is None:
            return
        if self._rank == 0:
            with contextlib.suppress(RuntimeError):  # a rank that is gone needs no word
                self.stop_others()
        self._thread.join(CLOSE_S)
        self._group = None

    # rank 0 ----------------------------------------------------------------------------------------------------------
    def stop_others(self) -> None:
        """Their `answers` return."""
        with self.lock:
            for rank in range(1, self._world):
                self.ask(rank, Kind.STOP)

    def invite(self, rank: int, place: bytes) -> None:
        """Let a rank join the group in which it sends, `OwnGroup.join`. Raises `Superseded` where the trainer stops."""
        with self.lock:
            self.check_open()
            self.ask(rank, Kind.JOIN, len(place))
            dist.send(torch.frombuffer(bytearray(place), dtype=torch.uint8), dst=rank, group=self._group)

    def dismiss(self, ranks: Sequence[int]) -> None:
        """They leave their groups; one that is gone needs no word, nor do those that received a stop."""
        with self.lock, contextlib.suppress(RuntimeError, Superseded):
            for rank in ranks:
                self.check_open()
                self.ask(rank, Kind.LEAVE)

    def check_open(self) -> None:
        """Raises `Superseded` where the trainer stops."""
        if self._closed.is_set():
            raise Superseded("the trainer stops")

    def ask(self, rank: int, kind: Kind, *words: int) -> None:
        question = torch.tensor([kind, *words, *[0] * (3 - len(words))], dtype=torch.int64)
        dist.send(question, dst=rank, group=self._group)

    def until_held(self, ranks: Sequence[int], version: int) -> None:
        """Waits for the answers of all ranks. Raises `Superseded` if one does not hold `version`."""
        answers = torch.zeros(len(ranks), dtype=torch.int64)
        for number, rank in enumerate(ranks):
            dist.recv(answers[number : number + 1], src=rank, group=self._group)
        if not answers.all():
            rank = ranks[answers.tolist().index(0)]
            raise Superseded(f"rank {rank} does not hold version {version} any more")

    def receive(self, rank: int, version: int, target: torch.Tensor) -> None:
        """The answer to a question of `version`. Raises `Superseded`."""
        self.until_held([rank], version)
        dist.recv(target, src=rank, group=self._group)

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            if self.lock.acquire(blocking=False):
                try:
                    if self._closed.is_set():  # the others may have stopped: no rank would receive the ping
                        return
                    for rank in range(1, self._world):
                        self.ask(rank, Kind.PING)
                except RuntimeError as error:
                    logger.error("another rank of the trainer does not take part in publishing: %s", error)
                    return
                finally:
                    self.lock.release()

    # the others ------------------------------------------------------------------------------------------------------
    def answers(self, answer: Callable[[Kind, int, int, int], None]) -> None:
        """Calls `answer` for each question until rank 0 says stop or is gone."""
        words = torch.zeros(4, dtype=torch.int64)
        try:
            while True:
                dist.recv(words, src=0, group=self._group)
                number, version, begin, end = words.tolist()
                if (kind := Kind(number)) == Kind.STOP:
                    return
                if kind != Kind.PING:
                    answer(kind, version, begin, end)
        except RuntimeError as error:
            if not self._closed.is_set():
                logger.error("rank 0 of the trainer asks for no more weights: %s", error)

    def place(self, nbytes: int) -> bytes:
        """Return the content of `invite`."""
        place = torch.empty(nbytes, dtype=torch.uint8)
        dist.recv(place, src=0, group=self._group)
        return place.numpy().tobytes()

    def say_held(self, has_version: bool) -> None:
        self.send(torch.tensor([int(has_version)], dtype=torch.int64))

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a tensor to rank 0."""
        dist.send(tensor, dst=0, group=self._group)
