"""Errors of the queue. All are `QueueError`; the docstrings say what a caller may do about them."""

from __future__ import annotations

from penstock.transfer_queue.types import RunIdentity


class QueueError(Exception):
    """Base of everything a queue raises."""


class NoSuchRun(QueueError):
    """The queue holds no run of this name (yet)."""


class RunTaken(QueueError):
    """The queue holds another run of this name; the message has the identities of both, and what to do."""

    def __init__(self, name: str, theirs: RunIdentity, ours: RunIdentity) -> None:
        if theirs.run_id == ours.run_id:
            message = (
                f"model: run {name} began with the model {theirs.model!r}, and this is {ours.model!r};"
                " leave model= out, or choose another name=…"
            )
        else:
            message = (
                f"run {name} is another run: in the queue {theirs}; here {ours}. Choose another name=…, continue that "
                "run from its own folder, or delete it (`penstock queue drop`)"
            )
        super().__init__(message)


class LeaseLost(QueueError):
    """The fencing token is outdated: another worker owns the episode. Stop working on it."""


class JournalMismatch(QueueError):
    """An entry was appended at a position that is not the journal's end. Fewer entries: the queue lost the newest with
    its machine, append them again. More: another process that has the lease's fence appended; `adopt` reads them."""

    def __init__(self, episode_id: str, position: int, entries: int) -> None:
        super().__init__(f"{episode_id}: journal entry {position}: the journal has {entries} entries")
        self.entries = entries
        """Entries that the queue holds."""


class BadPayload(QueueError):
    """A trajectory or payload was rejected; the message names the field. The episode stays leased."""


class StepError(QueueError):
    """A step number from the past, or out of order."""


class TrainerFenced(QueueError):
    """A later trainer has claimed the run. Permanent: this one must end without writing anything more."""


class TooManyFiltered(QueueError):
    """More groups with equal rewards than `max_filtered_steps` allows. Permanent: a retry raises it again."""


class QueueUnavailable(QueueError):
    """The store did not answer within the operation's deadline; the message names the store and the time."""
