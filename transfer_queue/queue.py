"""The protocol of the queue. Redis implements it for runs, memory for unit tests; one conformance suite covers both.

States of a group (all episodes of one task) in split ``train``:

    queued ──first lease──► admitted ──all members ended──► ready ──lease_batch(s)──► shipped(s)
       ▲                        │                             │                          │ publish_version(s+1)
       │                        └── too few members ──► dead  └── over-age ──► dropped   ▼
       └────────────────────────────────────────────────── (requeue) ── dead        trained(s) ──commit(≥s)──► gone

States of an episode: queued → leased → ended (completed | failed), and leased → queued again when its lease runs out,
is released, or failed with attempts left. Failures and lost leases are counted per episode and limited.

All times are the queue's, never a client's clock; in Redis they follow its TIME, but for steps of it.

**Admission (invariant 3).** Let c = current version = number of published steps, G = groups per step, η =
max_staleness. A group admitted by a worker whose server holds version u has all tokens at version ≥ u, so it must ship
at step ≤ due = u + η. It is admitted only if every group in the system can still ship in time: for all t ≥ due

    #{unfinished groups with due ≤ t} < (t − c + 1) · G

With u = c this is `admitted − consumed < (η+1)·G`; with u < c − η it is never true, so a server that fell too far
behind takes no new episodes; with η = 0 it makes a run synchronous.

**Shipping.** `lease_batch(s)` takes G ready groups, earliest due first, then oldest. It may overtake slow groups only
while those can still ship in time: afterwards, for all t > s, #{left groups with due ≤ t} ≤ (t − s) · G.
Otherwise, by `overage`: ``wait`` for them; ``drop`` or ``mask`` them once they are over the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.transfer_queue.ledger import LedgerEntry, UsageReport
from penstock.transfer_queue.status import Status
from penstock.transfer_queue.turns import TurnCall, TurnReport, Turns
from penstock.transfer_queue.types import (
    Announcement,
    AnnouncementMark,
    Batch,
    DataCursor,
    DeadLetter,
    FieldValues,
    Head,
    JournalEntry,
    Lease,
    Limits,
    Outcome,
    RunIdentity,
    RunRecord,
    ServerInfo,
    Task,
    Trajectory,
    Waiting,
    WeightUpdate,
)


class TransferQueue(Protocol):
    """Every method is one round trip (except payload bytes), raises `QueueUnavailable` after its deadline, and may be
    repeated: a client that lost the reply calls again, and nothing is counted twice."""

    # the run -------------------------------------------------------------------------------------------------------
    async def create_run(self, limits: Limits, config: str, identity: RunIdentity | None = None) -> RunRecord | None:
        """Create the run (None), or enter the existing one: `config`, the resolved YAML, replaces its own.

        Raises `QueueError` where its limits differ, and `RunTaken` if it is another run: one with another id or
        model, or, where one of the two has no identity, with another configuration. Nothing is changed then.
        """

    async def claim_head(self, holder: str, ttl_s: float, dead: str = "") -> Head | None:
        """Own the run of this name for `ttl_s`, or renew that: None; otherwise the head that owns it.

        `holder` names one process. `dead`: a holder that is known to have ended; its lease counts as over. The run need
        not exist.
        """

    async def release_head(self, holder: str) -> None:
        """Ignored where another one owns the run."""

    async def config(self) -> str:
        """The resolved YAML of the run. Raises `NoSuchRun`."""

    # data ----------------------------------------------------------------------------------------------------------
    async def submit(
        self, tasks: Sequence[Task], cursor: DataCursor | None = None, after: DataCursor | None = None
    ) -> int:
        """Queue tasks (one group each in ``train``, one episode each in other splits). Returns the number of new tasks.

        With `cursor` (place in the data stream after these tasks) the call is exactly-once for split ``train``: it
        is a no-op unless the stored cursor is smaller. With `after` (place before these tasks) it raises `StepError`
        if the stored cursor is smaller: the queue has lost tasks in a machine crash; continue at `cursor()`. Raises
        `BadPayload` naming the task and the field that no queue can hold, see `check_task`.
        """

    async def cursor(self) -> DataCursor:
        """Place in the data stream after the last submitted training task; (0, 0) at first."""

    # agent workers -------------------------------------------------------------------------------------------------
    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        """Up to `count` episodes for a worker whose newest server holds `version`; fewer if admission rejects more.

        Order: other splits first (evaluations are short), then members of groups already admitted,
        then new groups: highest priority first, then oldest task, skipping sources whose quota is used up.
        Expired leases return to the queue in this call. They count as lost: an episode that lost two runs with
        few others in its worker, one that lost three alone, and one that lost `max_lost_leases` is a dead letter. A
        worker that holds too many for the next episode gets nothing until it holds fewer.
        """

    async def adopt(self, episode_id: str, fence: int) -> Lease:
        """The lease that `fence` holds, renewed, with its current journal: for a process that takes it over.

        Raises `LeaseLost` if the episode has ended or another fence holds it.
        """

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        """Extend leases by the TTL; returns ids of episodes that the worker no longer owns."""

    async def journal(self, lease: Lease, entry: JournalEntry, position: int) -> None:
        """Append an entry and renew the lease. `position` is the number of entries before it; a repeat is a no-op.

        Raises `LeaseLost`, and `JournalMismatch` where the journal has another number of entries: fewer after a machine
        crash, more where another process with this fence has appended.
        """

    async def fork(self, lease: Lease, turn: int, prefix: Sequence[JournalEntry], count: int) -> list[str]:
        """Start branches of an episode: members of its group whose journals begin with `prefix`, entries of its own.

        `Limits.branches` is the number of branches per root. The other members of the group wait: each becomes a branch
        when an episode is forked, or a root once every started member has ended. Returns the ids of the branches:
        `count`, or fewer if fewer members wait. A repeat for the same `turn` returns the same ids, also to a later
        owner of the episode. Raises `LeaseLost`, and `JournalMismatch` if the journal is shorter than `prefix` after a
        machine crash.
        """

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        """Store the trajectory; the journal is deleted. Raises `LeaseLost`, `BadPayload`. A repeat is a no-op."""

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        """Report an infrastructure failure or cancellation. True: it is retried; False: it is a dead letter."""

    async def release(self, lease: Lease) -> None:
        """Return an episode to the queue; the journal is kept, no attempt counted. Lost leases are ignored."""

    async def prove_reward(self, reward: str) -> None:
        """Record that a reward of this name came in this run: its settings can give one. A repeat is a no-op."""

    async def is_reward_proven(self, reward: str) -> bool:
        """Return True once any worker of the run has called `prove_reward` with this name."""

    # trainer -------------------------------------------------------------------------------------------------------
    async def claim_training(self, holder: str) -> int:
        """Become the run's trainer, in `holder`'s name: returns an epoch above every earlier one, which this client
        carries from now on.

        Every call that writes steps or versions carries its client's epoch and raises `TrainerFenced` where a later one
        has been claimed: of two trainers that are alive, one writes. A client without an epoch is refused as soon as
        there is one.
        """

    def join_training(self, epoch: int) -> None:
        """Carry the epoch that another rank of this trainer has claimed."""

    async def check_training(self) -> None:
        """Before a write outside the queue, such as a checkpoint's. Raises `TrainerFenced`."""

    async def lease_batch(self, step: int) -> Batch | Waiting:
        """The groups of `step`. Once fixed, the answer is the same for every rank and after every crash."""

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        """Trajectories of finished, uncommitted episodes in the order given, from the store or the archive.

        Raises `BadPayload` naming the damaged part.
        """

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        """Only `fields` (names of `Segment` and `Trajectory`) in the order given; nothing else is transferred.

        Raises `BadPayload`, and `QueueError` for an unknown field.
        """

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        """Free payloads of the trained, uncommitted `step` in the store: they are durable in the archive.

        Each trainer rank spills its share. Returns the number freed; a repeat frees nothing. Raises `StepError` for a
        step that is not trained.
        """

    async def drop_lost(self, step: int, episode_ids: Sequence[str]) -> int:
        """Take episodes whose payload cannot be read or trained out of the fixed `step`, which may be left without any.

        A group that keeps fewer than `min_group` members leaves with them. All of them count as ``payload_lost``.
        Returns their number; episodes that are not in the step are skipped. Raises `StepError` for a step that is not
        fixed or is committed.
        """

    async def pass_step(self, step: int) -> bool:
        """Fix the step of the current version as one without groups: the next version has the same weights.

        Groups that were due in it are over age in the step after it. A repeat is a no-op; False where the step is of
        another version or has groups.
        """

    async def publish_version(self, announcement: Announcement) -> bool:
        """Make `version` current: step `version − 1` counts as trained. False (no-op) for a version already published.

        A trainer that resumes from an older checkpoint replays the steps in between on their recorded batches and
        publishes nothing until it is past the newest version: a version number never names two sets of weights. If the
        newest version's file is gone and the replayed weights are others, they get the next number (`pass_step`).
        """

    async def renew_manifest(self, announcement: Announcement) -> bool:
        """Replace the manifest of the CURRENT version (its file was lost with a machine). False if not current."""

    async def commit(self, step: int, batches: Mapping[int, Sequence[Sequence[str]]] | None = None) -> None:
        """Steps below `step` are in a durable checkpoint: what they hold is deleted, in pieces. Twice is a no-op.

        A client that dies in between has committed: the next commit deletes the rest.

        `batches` (step → groups, from the checkpoint) lets a queue that lost its last second in a machine crash catch
        up: steps that are in the checkpoint and unknown to the queue count as trained, and their groups are removed
        from whatever state they are in, so that none is trained twice. The version is then at least `step`; its
        weights are announced by `renew_manifest`. Without `batches` an unknown step raises `StepError`.
        """

    async def rewind(self, step: int) -> int:
        """Returns how many recorded batches from `step` on will be handed out again to a restarted trainer."""

    # versions and servers ------------------------------------------------------------------------------------------
    async def latest_version(self) -> Announcement | None:
        """The current announcement. Its manifest may have megabytes: ask for it where `latest_mark` has changed."""

    async def latest_mark(self) -> AnnouncementMark | None:
        """Which announcement `latest_version` would return, in a few bytes, for callers that ask again and again."""

    async def heartbeat(self, server: ServerInfo) -> None:
        """Register or refresh a server; it is removed after `registry_ttl_s` without heartbeat."""

    async def deregister(self, server_id: str) -> None: ...

    async def servers(self) -> list[ServerInfo]: ...

    async def report_update(self, update: WeightUpdate) -> None: ...

    async def updates(self) -> list[WeightUpdate]:
        """The newest `KEPT_UPDATES`, in the order in which they were reported."""

    # the ledger, see `ledger` ----------------------------------------------------------------------------------------
    async def report_usage(self, usage: UsageReport) -> None: ...

    async def ledger(self, after: int, limit: int = 1000) -> list[LedgerEntry]:
        """The next entries with numbers above `after`, in order. Each episode of split ``train`` has a fate once it has
        ended, but for one whose payload is lost after its step was published, which has two."""

    async def trim_ledger(self, upto: int) -> None:
        """Delete the entries with numbers up to this one: they are in a head's accounts."""

    # turns on devices that engines and trainer share, see `turns` -----------------------------------------------------
    async def take_turn(self, call: TurnCall) -> Turns:
        """Hold the devices, or wait for them, or rest; renews the caller's entry for `call.ttl_s`.

        Held where no other side holds them, no trainer waits before this engine, and the claim is within the budget.
        A call whose number is not above the holder's last one changes nothing: it is a repeat, or was overtaken.
        """

    async def turns(self) -> Turns:
        """All entries, as an onlooker sees them."""

    async def turn_reports(self) -> list[TurnReport]:
        """The newest `KEPT_TURN_REPORTS`, oldest first: every change of who holds, claims and uses what."""

    async def held(self) -> set[str]:
        """Ids of finished training episodes in unfinished, ready and uncommitted groups.

        For audits; linear in their number.
        """

    # other splits ---------------------------------------------------------------------------------------------------
    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        """Finished trajectories of a split, and the number of its unfinished episodes."""

    async def drop_split(self, split: str) -> None:
        """Delete everything of a split other than ``train``."""

    # watching ------------------------------------------------------------------------------------------------------
    async def add_wait(self, role: str, cause: str, seconds: float) -> None: ...

    async def status(self) -> Status: ...

    async def dead_letters(self, limit: int = 100, start: int = 0) -> list[DeadLetter]:
        """Oldest first, from the `start`-th on."""

    async def dead_letter(self, episode_id: str) -> DeadLetter | None: ...

    async def requeue(self, episode_id: str) -> None:
        """Queue the whole group of a dead letter again, as it was submitted."""

    async def drop_run(self) -> int:
        """Delete everything of the run; returns the number of keys deleted."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """Part of a run that every role gets: in the jobs of agent worker, rollout server, gateway and trainer."""

    queue: TransferQueue
    """Connected; the caller closes it."""
    model: str
    """Folder or hub name of the tokenizer and of the weights of version 0."""
    token: str = field(default="", repr=False)
    """The run's token, asked of everyone who calls one of its servers."""
    name: str = ""
    """The run's name."""
    seed: int = 0
    """Seed of everything that a role draws at random."""
    recipe_dir: Path = Path()
    """Files named in the recipe are searched here first."""
    lease_ttl_s: float = 15.0
    """A lease that is not renewed for this long is lost."""
    routing_replay: bool = False
    """Engines record which experts read each token, and the trainer replays them."""
    max_model_len: int = 0
    """Tokens that an engine's context holds; 0: not known."""
    teacher_top_k: tuple[int, ...] = ()
    """Number of likeliest ids per sampled token that each teacher gives; 0: none."""
