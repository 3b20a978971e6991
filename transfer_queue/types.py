"""The data types of the queue: a `Task` goes to an agent worker, a `Trajectory` comes back for the trainer.

dataset row ──► Task ──lease──► agent loop ──journal──► JournalEntry …
                                    └──complete──► Trajectory(Segment …) ──lease_batch──► trainer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Mask = NDArray[np.uint8]
Logprobs = NDArray[np.float32]
Spans = NDArray[np.int32]
RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]
"""[tokens, layers, k] of a mixture of experts: the k experts that each layer's router chose for each token; layers
without experts are left out. uint8 where there are at most 256 experts. k equal numbers, which no router chooses, say
that the choice is not known."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset, as an agent loop receives it. All fields are plain data (msgpack can hold them)."""

    task_id: str
    """Unique in the run, for example ``train/00000012``: split, then position in the split's stream."""
    split: str
    """``train``, or an evaluation's name such as ``eval/40``. Only ``train`` counts for admission and steps."""
    messages: Sequence[Mapping[str, Any]]
    """The prompt as chat messages (verl's column ``prompt``)."""
    data_source: str
    """Names the dataset; handed to the reward function."""
    ground_truth: Any
    """verl's ``reward_model.ground_truth``."""
    agent_name: str | None = None
    """Registered name or dotted path of the agent loop; None takes the run's default."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Everything else of the row; handed to the reward function."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the run's sampling, for example ``{"temperature": 0.0}`` for greedy evaluation."""
    min_version: int = 0
    """The episode is leased only to be sampled by servers at this policy version or newer."""
    priority: int = 0
    """−1000 … 1000; a queued group with a higher one is admitted first. Equal ones go in the order of submission."""
    group_size: int | None = None
    """Episodes of this task in training, at least 1; None: as the run's limits say. In other splits a task has one."""


@dataclass(frozen=True, slots=True, order=True)
class DataCursor:
    """A place in the endless stream of training tasks: everything before it has been submitted, once per epoch."""

    epoch: int = 0
    index: int = 0
    """Position within the epoch's order."""


class OutcomeKind(StrEnum):
    """Kinds of an episode's end. Only the first three may carry a reward (invariant 5)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    POLICY_ERROR = "policy_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


KEPT_FAILURES = 20
"""Different failures that a queue counts; any further one is counted as `OTHER_FAILURES`."""
OTHER_FAILURES = "other causes"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A typed ending: what happened, to which component, and why."""

    kind: OutcomeKind
    reason: str = ""
    """``length``, ``turns`` or ``deadline`` where truncated; free text elsewhere."""
    component: str = ""
    """Which part failed (``sandbox``, ``rollout``, ``reward`` …); only for ``infra_error``."""

    @property
    def failure(self) -> str:
        """Component and first line of the reason, for counting; at most 200 characters."""
        words = (self.component or self.kind, self.reason.partition("\n")[0])
        return ": ".join(filter(None, words))[:200]

    @property
    def may_carry_reward(self) -> bool:
        return self.kind in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED, OutcomeKind.POLICY_ERROR)


COMPLETED = Outcome(OutcomeKind.COMPLETED)


@dataclass(frozen=True, slots=True)
class Segment:
    """One append-only token sequence of an episode. P = prompt length, T = response length.

    Invariant 1: `response_ids` where `response_mask` is 1 are exactly the ids an engine sampled, in order;
    everything else is exactly what it was fed.
    """

    prompt_ids: Ids
    """[P] what the first call was fed."""
    response_ids: Ids
    """[T] sampled ids and tool observations, interleaved as they happened."""
    response_mask: Mask
    """[T] 1 = sampled by the policy, 0 = fed to it."""
    response_logprobs: Logprobs
    """[T] the engine's logprob of each sampled id at the sampling temperature; 0.0 where the mask is 0."""
    version_spans: Spans
    """[S, 3] rows (policy version, start, end) over response positions; they cover every sampled position once."""
    turn_starts: Ids
    """[num_turns] response position of each model call's first sampled id."""
    teacher_logprobs: Logprobs | None = None
    """[T] a teacher's logprob of each sampled id at temperature 1; 0.0 where the mask is 0. None: no teacher."""
    routed_experts: RoutedExperts | None = None
    """[P + T, layers, k] which experts read each id, prompt first, in the engine's forward pass. The pass over position
    i − 1 sampled id i, so the version of a sampled id is that of the choices one position before it. No pass reads the
    last id. None: the engine did not report it."""
    teacher_top_ids: Ids | None = None
    """[S, k] the k ids that the teacher holds likeliest in the place of each sampled id, the likeliest first, no id
    twice. S counts the ones of the mask, in order. Only beside `teacher_logprobs`; None: not asked for."""
    teacher_top_logprobs: Logprobs | None = None
    """[S, k] their logprobs at temperature 1. None where `teacher_top_ids` is."""

    @property
    def num_turns(self) -> int:
        return len(self.turn_starts)

    def versions(self) -> NDArray[np.int32]:
        """[T] policy version of each sampled token; -1 where the mask is 0."""
        versions = np.full(len(self.response_ids), -1, dtype=np.int32)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        versions[self.response_mask == 0] = -1
        return versions


@dataclass(frozen=True, slots=True)
class EpisodeImages:
    """The images of a trajectory, each once, named by the sha256 of its file's bytes (PNG, JPEG …), as hex digits.

    A trajectory carries the bytes of what its tools and messages brought along. What its task names by a file stays
    there: all episodes of a row share it.
    """

    by_segment: Sequence[Sequence[str]]
    """For each segment the images in the order of their places in its ids; what stands there twice is named twice."""
    data: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes of those that travel with the trajectory."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """``file:///…`` of the others."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: its segments, reward and outcome. Produced by an agent worker, consumed by the trainer."""

    episode_id: str
    """``{task_id}#{member}``."""
    task_id: str
    segments: Sequence[Segment]
    reward: float | None
    """None where the outcome may not carry one."""
    outcome: Outcome
    turn_rewards: Sequence[float] = ()
    num_turns: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers averaged into the step's metrics (``tool_calls``, ``reward/format`` …)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for people: texts of tool results, the worker's name, timings."""
    data_source: str = ""
    images: EpisodeImages | None = None
    """None: it has none."""

    @property
    def num_sampled(self) -> int:
        return int(sum(int(s.response_mask.sum()) for s in self.segments))

    @property
    def fault(self) -> str:
        """The episode's fault in words; empty if it came to its end and every call was answered."""
        ended = "" if self.outcome.kind is OutcomeKind.COMPLETED else f"{self.outcome.kind} ({self.outcome.reason})"
        return str(self.extra.get("fault") or ended)

    @property
    def min_version(self) -> int | None:
        """Oldest policy version that sampled any token; None where nothing was sampled."""
        versions = [int(s.version_spans[:, 0].min()) for s in self.segments if len(s.version_spans)]
        return min(versions, default=None)


@dataclass(frozen=True, slots=True)
class FieldValues:
    """Some fields of a trajectory, read without the others."""

    episode_id: str
    plain: Mapping[str, Any]
    """Fields of the trajectory itself: ``reward``, ``metrics`` …"""
    segments: Sequence[Mapping[str, NDArray[Any]]]
    """Per segment, fields of `Segment`: ``response_mask`` …"""


class JournalKind(StrEnum):
    SAMPLED = "sampled"
    """A model call was answered: ids, logprobs, version spans, finish reason."""
    TOOLS = "tools"
    """The tools of a turn were run: their results, and the sandbox session that holds their state."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event of an episode, appended before anything that depends on it happens. N = sampled ids.

    A resumed episode runs its loop again from the start; model calls and tools are answered from the journal while it
    lasts, so nothing that was sampled is sampled twice and no tool runs twice. `context_len` and `context_hash` name
    the ids that the call was fed: where a replay would feed others, the loop is not deterministic and starts afresh.
    """

    kind: JournalKind
    context_len: int = 0
    context_hash: int = 0
    """xxh3-64 of the int32 little-endian ids that the call was fed (kind ``sampled``)."""
    ids: Ids | None = None
    """[N]"""
    logprobs: Logprobs | None = None
    """[N]"""
    version_spans: Spans | None = None
    """[S, 3] over positions of `ids`."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: ``finish_reason``; tool ``results``; ``sandbox_session``."""
    routed_experts: RoutedExperts | None = None
    """[R, layers, k] of the R positions of context and `ids` before the last of `ids`. See `Segment`."""


def count_sampled(entries: Sequence[JournalEntry]) -> int:
    """Return the number of tokens that were sampled in `entries`."""
    return sum(len(entry.ids) for entry in entries if entry.ids is not None)


KEPT_UPDATES = 10_000
"""Weight updates that a queue keeps; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the queue enforces for a run. Written once by `create_run`."""

    group_size: int
    """Episodes of a task that says nothing else."""
    groups_per_step: int
    max_staleness: int
    overage: str = "wait"
    """``wait`` | ``mask`` | ``drop``"""
    min_group: int = 2
    """A group is trained without members lost to infrastructure if at least this many carry a reward."""
    max_attempts: int = 3
    """Infrastructure failures per episode until it becomes a dead letter."""
    max_lost_leases: int = 4
    """Leases of an episode lost with their workers until it becomes a dead letter; at least 4, see
    `admission.most_together`."""
    lease_ttl_s: float = 30.0
    max_bytes: int = 4 << 30
    """Back-pressure: no group is admitted while unconsumed payloads hold more than this."""
    max_groups: int = 0
    """Back-pressure: groups in the system (admitted, ready, shipped and not yet trained); 0 = as staleness allows."""
    filter_groups: str = "none"
    """``none`` | ``zero_variance``: whether a group whose rewards are all equal is filtered instead of trained."""
    max_filtered_steps: int = 10
    """The run stops if more than this many steps' worth of groups are filtered for one step; 0 = no limit."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """data_source → maximum of its groups that are unshipped (admitted or ready); other sources are unbounded."""
    branches: int = 0
    """Branches that each root of a training group may have, see `TransferQueue.fork`; 0: every member is a root."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which run this is. Two runs of one name in one queue differ in at least the first."""

    run_id: str
    """Made once, kept in the run's folder."""
    config_hash: str
    """Hash of the resolved YAML; a run that is resumed may have other settings."""
    model: str
    """Name of the model without its folder; a run keeps it."""

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value or 'none'}"
            for name, value in (("id", self.run_id), ("configuration", self.config_hash), ("model", self.model))
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that the queue holds already."""

    identity: RunIdentity
    """The record as it was before this call."""
    age_s: float
    """Since its creation, by the queue's clock."""


@dataclass(frozen=True, slots=True)
class Head:
    """The process that owns a run: `penstock run`."""

    holder: str
    left_s: float
    """Until its lease ends, unless it renews it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a branch leaves its parent: its journal begins with the parent's first entries."""

    parent: str
    """Episode id."""
    turn: int
    """The parent's model call that the branch samples anew; those before it are shared."""
    entries: int
    """Entries of the journal that are the parent's."""
    sampled: int
    """Tokens that were sampled in them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to run one episode until it expires or is renewed."""

    episode_id: str
    task: Task
    member: int
    """0 … group_size − 1"""
    attempt: int
    """0 for the first try; counts infrastructure failures, not lost workers."""
    fence: int
    """Grows with every lease of the episode; calls with an older fence are rejected."""
    min_version: int
    """No token of this episode may be sampled below this version (the group's floor)."""
    journal: Sequence[JournalEntry] = ()
    """Entries of earlier owners of the episode."""
    origin: Origin | None = None
    """None: the episode is a root, it begins with its task."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, fixed by the first `lease_batch` of that step."""

    step: int
    groups: Sequence[Sequence[str]]
    """Episode ids by group, only members that carry a reward, oldest group first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The reason why a batch is not available yet."""

    cause: str
    """One readable line: ``3 of 8 groups ready; 5 in flight``, ``slow groups train/7, train/9 are due``."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A published policy version and its weight manifest, plain data made by `weight_sync`."""

    version: int
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnnouncementMark:
    """Identifies an announcement in a few bytes, without its manifest: equal marks are of equal announcements."""

    version: int
    digest: str
    """Hash of the announcement's content: a renewed manifest, or a number that is used again, has another one."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One rollout server's heartbeat."""

    server_id: str
    url: str
    version: int
    in_flight: int = 0
    accepting: bool = True
    in_flight_tokens: int = 0
    """Tokens of the requests in flight: prompts and the expected rest of the responses."""
    evaluates: bool = False
    """Serves only evaluation episodes, and keeps its version while an evaluation runs."""
    refused: int | None = None
    """The newest version, where the server has refused to load it."""
    refusal: str = ""
    """Why, for people."""
    asleep: bool = False
    """True while its devices are the trainer's: it takes no requests until it has them back."""
    engine: str = ""
    """Name and version of its engine; empty of an older server. Those of one run are alike."""
    age_s: float = field(default=0.0, compare=False)
    """Age of the heartbeat by the queue's clock when the registry was read; set by the queue only."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One weight update of one server, as measured by the server."""

    server_id: str
    version: int
    pause_s: float
    fetch_s: float
    load_s: float
    in_flight: int
    """Requests that were running when the update began and continued after it."""
    at_unix_s: float = 0.0
    """Time of completion by the server's clock; 0 if an older server reported it."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A failed episode with its outcome and journal. Journals are kept for the newest letters only."""

    episode_id: str
    outcome: Outcome
    attempts: int
    journal: Sequence[JournalEntry] = ()
