"""The account of a stage that has played to its end: where is every episode that was submitted?

Each task is in exactly one place: trained (its rewarded members in one step of the trainer's newest checkpoint), held
(ready, too few for a step), or counted under one reason: filtered, dropped over age, dead, payload lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from faults.episodes import (
    position_of,
    read_folder,
    read_records,
    task_id_at,
    task_of,
    trajectory_print,
)
from faults.plan import FaultPlan
from faults.trainer import Checkpoints, Trained
from penstock.transfer_queue import Status, TransferQueue

REASONS = {"filtered": "filtered", "dropped_over_age": "dropped", "dead": "dead", "payload_lost": "payload_lost"}
"""State of a group that will not be trained → name in the account."""


@dataclass
class Account:
    """Counts of episodes where nothing else is said."""

    seed: int
    kills: Mapping[str, int]
    tasks: int
    acknowledged: int
    trained: int
    steps: int
    owed: int
    """Finished and still held, because too few groups for a step are left."""
    reasons: Mapping[str, int]
    """Groups that will not be trained, by reason."""
    lost: list[str]
    """Acknowledged, and in no place; with why we think so."""
    twice: list[str]
    """Trained more than once in the final lineage, or acknowledged to two workers."""
    poison_rows: int
    """Episodes that end their workers, accounted as dead letters."""
    lost_payloads: int
    """Episodes that left their step because a payload was gone, accounted under that reason."""
    versions_with_two_contents: int
    """Version numbers that were announced with more than one set of weights."""
    counts: Mapping[str, int]
    """What else was done to the run, by name: `Intruders.counts`, `Troupe.counts`."""
    wrong: list[str] = field(default_factory=list)
    """Everything else that does not add up."""

    @property
    def line(self) -> str:
        counts = {"kills": dict(self.kills), "tasks": self.tasks, "acknowledged": self.acknowledged}
        counts |= {"trained": self.trained, "steps": self.steps, "owed": self.owed, **self.reasons}
        counts |= {"poison_rows": self.poison_rows, "lost_payloads": self.lost_payloads, **self.counts}
        counts |= {"versions_with_two_contents": self.versions_with_two_contents}
        counts |= {"lost": len(self.lost), "twice": len(self.twice), "wrong": len(self.wrong)}
        return f"account of seed {self.seed}: " + ", ".join(f"{name} {count}" for name, count in counts.items())

    def check(self) -> None:
        """Raises `AssertionError` with all that is wrong, unless every episode is accounted for."""
        found = [*("lost: " + name for name in self.lost), *("twice: " + name for name in self.twice), *self.wrong]
        assert not found, "\n".join([self.line, *found])


async def draw_up(
    plan: FaultPlan, queue: TransferQueue, kills: Mapping[str, int], counts: Mapping[str, int], deleted: Set[str]
) -> Account:
    """The account of a stage whose work is drained. Asks the queue by its public protocol only.

    `deleted`: episodes whose payload was deleted; they may be missing in what was trained.
    """
    books = Books(plan, deleted)
    status, held = await queue.status(), await queue.held()
    tasks = {task_id_at(position) for position in range(position_of(await queue.cursor()))}
    if plan.may_lose_tail:
        tasks |= tasks_of(books.trained)  # trained, and their submission is lost: they will be fed again
    account = Account(
        seed=plan.seed,
        kills=kills,
        tasks=len(tasks),
        acknowledged=len(books.acknowledged),
        trained=len(books.trained),
        steps=len(books.lineage),
        owed=len(held),
        reasons={name: status.groups[state] for state, name in REASONS.items()},
        lost=books.lost(held),
        twice=books.twice(),
        poison_rows=len(books.poisoned & (letters := await dead_episodes(queue))),
        lost_payloads=status.episodes["payload_lost"],
        versions_with_two_contents=len(ambiguous := books.versions_with_two_contents()),
        counts={
            **counts,
            "completions_repeated": sum(record["kind"] == "repeated" for record in books.told),
            "branches": len({record["episode"] for record in books.told if "shared" in record and "episode" in record}),
        },
    )
    if not plan.may_lose_tail:  # else numbers are assigned again
        account.wrong += [f"version {version} was announced with two contents" for version in ambiguous]
    account.wrong += books.wrong_lineage() + books.wrong_prints() + books.wrong_fences()
    account.wrong += wrong_counters(plan, books, status, held, tasks)
    account.wrong += await wrong_payloads(books, queue, held - deleted)
    account.wrong += books.wrong_poison(held, letters) + books.wrong_forks()
    account.wrong += wrong_losses(account.lost_payloads, deleted)
    return account


class Books:
    """What the processes wrote down."""

    def __init__(self, plan: FaultPlan, deleted: Set[str]) -> None:
        self._plan = plan
        self._deleted = deleted
        self.told = read_folder(plan.folder / "told")
        self.acknowledged = {record["episode"]: record for record in self.told if record["kind"] == "acknowledged"}
        self.poisoned = {record["episode"] for record in self.told if record["kind"] == "poisoned"}
        self.begun = {record["episode"] for record in self.told if record["kind"] == "about"}
        self.lineage = Checkpoints(plan.folder / "checkpoints").lineage()
        self.steps_of: dict[str, list[int]] = defaultdict(list)
        for trained in self.lineage:
            for group in trained.groups:
                for episode in group:
                    self.steps_of[episode].append(trained.step)

    @property
    def trained(self) -> set[str]:
        return set(self.steps_of)

    def lost(self, held: set[str]) -> list[str]:
        """Acknowledged with a reward, its group was trained or is held, and it is not there."""
        trained_tasks, held_tasks = tasks_of(self.trained), tasks_of(held)
        lost = []
        for episode, record in self.acknowledged.items():
            rewarded, task = record["reward"] is not None, task_of(episode)
            if rewarded and task in trained_tasks and episode not in self.steps_of and episode not in self._deleted:
                lost.append(f"{episode} of a trained group")
            if rewarded and task in held_tasks and episode not in held:
                lost.append(f"{episode} of a held group")
        return lost if not self._plan.may_lose_tail else []

    def twice(self) -> list[str]:
        twice = [f"{episode} in steps {steps}" for episode, steps in self.steps_of.items() if len(steps) > 1]
        if self._plan.may_lose_tail:
            return twice
        times = Counter(record["episode"] for record in self.told if record["kind"] == "acknowledged")
        return twice + [f"{episode} acknowledged {count} times" for episode, count in times.items() if count > 1]

    def versions_with_two_contents(self) -> list[int]:
        """Return the numbers of versions of which trainers announced, or others read, more than one set of weights."""
        contents: dict[int, set[str]] = defaultdict(set)
        for record in (*self.told, *read_records(self._plan.folder / "trainer.jsonl")):
            if record["kind"] == "version":
                contents[record["version"]].add(record["contents"])
        return sorted(version for version, found in contents.items() if len(found) > 1)

    def wrong_lineage(self) -> list[str]:
        """The model has seen every step once, in order; each life trained a step on the same batch as all others."""
        steps = [trained.step for trained in self.lineage]
        wrong = [] if steps == list(range(len(steps))) else [f"the model's steps are {steps}"]
        if self._plan.may_lose_tail:
            return wrong
        seen = {trained.step: trained for trained in self.lineage}
        for record in read_records(self._plan.folder / "trainer.jsonl"):
            if record["kind"] == "trained":
                trained = Trained(record["step"], record["groups"], record["prints"])
                if not self._same(seen.setdefault(trained.step, trained), trained):
                    wrong.append(f"step {trained.step} had another batch in life {record['life']}")
        return wrong

    def _same(self, one: Trained, other: Trained) -> bool:
        """But for groups of which a payload was deleted between the two."""
        changed = tasks_of(set(self._deleted))

        def unchanged(trained: Trained) -> list[list[tuple[str, str]]]:
            groups = [group for group in trained.groups if task_of(group[0]) not in changed]
            return [[(episode, trained.prints[episode]) for episode in group] for group in groups]

        return unchanged(one) == unchanged(other)

    def wrong_poison(self, held: set[str], letters: set[str]) -> list[str]:
        """A group that is trained or held has nothing open: its poison row is a dead letter."""
        ended = tasks_of(self.trained) | tasks_of(held)
        owed = [episode for episode in self.poisoned - letters if task_of(episode) in ended]
        trained = self.poisoned & (self.trained | held | set(self.acknowledged))
        return [f"{episode} ends its workers and is no dead letter" for episode in owed] + [
            f"{episode} ends its workers and was finished" for episode in trained
        ]

    def wrong_forks(self) -> list[str]:
        """A branch begins as a fork of its parent said; a fork that is repeated has the same branches."""
        asked: dict[str, set[str]] = defaultdict(set)
        answers: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for record in self.told:
            if record["kind"] == "forks":
                asked[record["parent"]].add(record["shared"])
            if record["kind"] == "forked":
                answers[record["parent"]].add(tuple(record["branches"]))
        branches = [record for record in self.told if record["kind"] == "leased" and "shared" in record]
        wrong = [
            f"{record['episode']} does not begin as {record['parent']}"
            for record in branches
            if record["shared"] not in asked[record["parent"]]
        ]
        if self._plan.may_lose_tail:
            return wrong
        return wrong + [f"{parent} was forked into {found}" for parent, found in answers.items() if len(found) > 1]

    def wrong_fences(self) -> list[str]:
        """A fence keeps owners of an episode apart: no two have the same."""
        owners: dict[tuple[str, int], set[str]] = defaultdict(set)
        for record in self.told:
            if record["kind"] == "leased":
                owners[record["episode"], record["fence"]].add(record["owner"])
        return [
            f"{episode}: fence {fence} was given to {sorted(both)}"
            for (episode, fence), both in owners.items()
            if len(both) > 1
        ]

    def wrong_prints(self) -> list[str]:
        """What the trainer read is what a worker completed."""
        completed = {(record["episode"], record["print"]) for record in self.told if record["kind"] == "about"}
        read = {pair for trained in self.lineage for pair in trained.prints.items()}
        return [f"{episode} was read with print {seen}, which nobody completed" for episode, seen in read - completed]


def wrong_counters(plan: FaultPlan, books: Books, status: Status, held: set[str], tasks: set[str]) -> list[str]:
    """The queue's own counts against the books."""
    groups, episodes = status.groups, status.episodes
    trained_groups = sum(len(trained.groups) for trained in books.lineage)
    reasons = sum(groups[state] for state in REASONS)
    if plan.may_lose_tail:
        # Trained in steps that the queue lost, then filtered or dropped before it caught up: counted under both.
        reasons, groups = reasons - (both := max(0, groups["submitted"] - len(tasks))), dict(groups)
        groups["submitted"] -= both
        groups["filtered"] -= both
    other = len(tasks - tasks_of(books.trained) - tasks_of(held))
    expected: dict[str, tuple[Any, Any]] = {
        "submitted groups": (groups["submitted"], len(tasks)),
        "groups in all states": (sum(groups.values()) - groups["submitted"], len(tasks)),
        "committed groups": (groups["committed"], trained_groups),
        "groups of trained episodes": (len(tasks_of(books.trained)), trained_groups),
        "groups neither trained nor held": (other, reasons),
        "ready groups": (groups["ready"], len(tasks_of(held))),
        "trained episodes": (episodes["trained"], len(books.trained)),
        "committed episodes": (episodes["committed"], len(books.trained)),
        "queued and leased episodes": (episodes["queued"] + episodes["leased"], 0),
        "steps": ((status.version, status.step, status.committed_step), (len(books.lineage),) * 3),
        "completed episodes by place": (episodes["completed"], placed(episodes, held)),
    }
    wrong = [f"{name}: {found}, expected {want}" for name, (found, want) in expected.items() if found != want]
    if not plan.may_lose_tail and not len(books.acknowledged) <= episodes["completed"] <= len(books.begun):
        bounds = f"{len(books.acknowledged)} acknowledged, {len(books.begun)} begun"
        wrong.append(f"completed: {episodes['completed']}; {bounds}")
    return [*wrong, *(f"{task} was never submitted" for task in tasks_of(books.trained) - tasks)]


async def dead_episodes(queue: TransferQueue) -> set[str]:
    found: set[str] = set()
    while page := await queue.dead_letters(start=len(found)):
        found |= {letter.episode_id for letter in page}
    return found


def wrong_losses(lost: int, deleted: Set[str]) -> list[str]:
    """What nobody deleted is not lost. One that is lost may take its group along, which has at most four members."""
    return [f"{lost} payloads lost, {len(deleted)} were deleted"] if lost > 4 * len(deleted) else []


def placed(episodes: Mapping[str, int], held: set[str]) -> int:
    places = ("trained", "dropped", "filtered", "unrewarded", "group_failed", "payload_lost")
    return len(held) + sum(episodes[name] for name in places)


async def wrong_payloads(books: Books, queue: TransferQueue, held: set[str]) -> list[str]:
    """What is held can be read, as it was completed."""
    completed = {(record["episode"], record["print"]) for record in books.told if record["kind"] == "about"}
    read = [(one.episode_id, trajectory_print(one)) for one in await queue.read(sorted(held))]
    return [f"{episode} is held with print {seen}, which nobody completed" for episode, seen in set(read) - completed]


def tasks_of(episodes: set[str]) -> set[str]:
    return {task_of(episode) for episode in episodes}
