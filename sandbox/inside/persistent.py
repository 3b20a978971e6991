"""Children that persist between calls: the interpreter and the shell.

Each reads requests from one pipe and reports outcomes over another. It shares its process or its uid with the code it
runs, which can therefore forge its own outcome, and nothing else: the driver takes no more from here than "call N
ended with exit code C", and N cannot be guessed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.sandbox.inside import interpreter, shell
from penstock.sandbox.inside.children import ChildTable, ForkedChild

BODIES: dict[str, Callable[[int, int], int]] = {"python": interpreter.serve, "shell": shell.become}


class PersistentChild:
    """A living child with the driver's ends of its two pipes."""

    def __init__(self, child: ForkedChild, requests: int, outcomes: int) -> None:
        self.child = child
        self.requests = requests
        self.outcomes = outcomes
        self.last_exit_code = 0
        self.doomed = False
        """True once the child has been asked to exit; `settle` then removes it."""

    def close(self) -> None:
        os.close(self.requests)
        os.close(self.outcomes)


class PersistentChildren:
    """At most one of each kind in `BODIES`."""

    def __init__(self, processes: ChildTable) -> None:
        self.processes = processes
        self.living: dict[str, PersistentChild] = {}
        self.unreported: set[str] = set()
        """Kinds whose state was lost, which no answer to a call of that kind has reported yet."""
        self._nothing = os.open(os.devnull, os.O_RDONLY)

    def children(self, but: str | None = None) -> list[ForkedChild]:
        return [resident.child for kind, resident in self.living.items() if kind != but]

    def get(self, kind: str) -> PersistentChild:
        """The living one, else a fresh one. Raises OSError where the box has no room for it."""
        self.settle()
        if kind not in self.living:
            self.living[kind] = self._start(kind)
        return self.living[kind]

    def _start(self, kind: str) -> PersistentChild:
        theirs_in, requests = os.pipe()
        outcomes, theirs_out = os.pipe()
        os.set_blocking(outcomes, False)
        body = lambda: BODIES[kind](theirs_in, theirs_out)  # noqa: E731
        try:
            child = self.processes.spawn(body, self._nothing, (theirs_in, theirs_out), spared=self.children())
        except OSError:
            os.close(requests)
            os.close(outcomes)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        if kind == "shell":
            os.write(requests, shell.PRELUDE)
        return PersistentChild(child, requests, outcomes)

    def kill(self, kind: str) -> None:
        """With it goes all that its code started, unless another resident holds it: nothing lives on unwatched."""
        self.living[kind].doomed = True
        self._kill_all_but(self.children(but=kind))

    def kill_strangers(self) -> None:
        """All that no resident started; the persistent too where those fork faster than they can be ended."""
        self._kill_all_but(self.children())

    def kill_everything(self) -> None:
        """All but the driver."""
        self._kill_all_but([])

    def _kill_all_but(self, spared: list[ForkedChild]) -> None:
        if not spared or not self.processes.kill_all_but(spared):
            self.processes.kill_all()
            for resident in self.living.values():
                resident.doomed = True

    def settle(self) -> None:
        """Forgets those that ended, or were asked to, with all that they started."""
        gone = [kind for kind, it in self.living.items() if it.doomed or self.processes.ended(it.child)]
        for kind in gone:
            resident = self.living.pop(kind)
            self.unreported.add(kind)
            self.processes.forget(resident.child)
            resident.close()
        if gone:
            self.kill_strangers()

    def report_loss(self, kind: str) -> bool:
        """Returns True once after state of this kind was lost."""
        lost = kind in self.unreported
        self.unreported.discard(kind)
        return lost
