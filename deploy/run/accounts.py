"""Accounts of cost: every token, device second and box second of a run, under its use.

    ledger of the queue ──► usage of episodes that run ──fate──► trained, filtered, over age …, sampled again
                        ├──► usage of no episode ──────────────► idle and why, start and end, evaluation
                        └──► all that a process used, at its end ► what it did not report: start and end, killed

What an episode used beyond its trajectory was sampled again: an attempt failed, or its worker or server was killed. The
sums of the accounts are what servers, workers and trainer have counted, and the kernel at their end; nothing is
estimated.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common import read_jsonl, write_atomically
from penstock.deploy.config import RunConfig
from penstock.deploy.costs import CostConfig
from penstock.deploy.run.processes import EndedProcess
from penstock.deploy.run.supervisor import SupervisedRole
from penstock.deploy.run_dir import END_SUFFIX
from penstock.transfer_queue import (
    ENDED,
    IDLE,
    KILLED,
    SETUP,
    STEP,
    Fate,
    LedgerEntry,
    Status,
    TransferQueue,
    UsageReport,
)


def idle_cause(status: Status, config: RunConfig) -> str:
    """Return in words why rollout servers have no requests, as far as the queue's state says it."""
    in_system = sum(status.groups.get(name, 0) for name in ("admitted", "ready", "shipped"))
    if status.episodes.get("leased", 0):
        return "episodes wait for tools, environments and rewards"
    if in_system >= (config.max_staleness + 1) * config.groups_per_step:
        return "the trainer is behind"
    return "agent workers take no task" if status.groups.get("queued", 0) else "no task is queued"


def shares(accounts: Mapping[str, float]) -> str:
    """Return the shares of a resource's accounts in words, the largest first."""
    total = sum(accounts.values())
    ordered = sorted(accounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{amount / total:.1%} {account}" for account, amount in ordered)


def cost_figures(costs: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of the summary that tell the cost; none where the recipe has no prices. `rows`: metrics of the
    steps."""
    if not costs:
        return {}
    total = sum(costs.values())
    solved = sum(row.get("solved_tasks", 0) for row in rows)
    points = sum(row["reward"] * row["episodes"] for row in rows)
    return {
        "cost": {account: round(cost, 4) for account, cost in costs.items()},
        "cost_total": round(total, 4),
        "cost_per_solved_task": round(total / solved, 6) if solved else None,
        "cost_per_reward_point": round(total / points, 6) if points > 0 else None,
    }


def describe_cost(summary: Mapping[str, Any]) -> str:
    """Return the cost of a run whose summary has `cost_figures`, in words."""
    task, point = (summary[f"cost_per_{what}"] for what in ("solved_task", "reward_point"))
    each = [f"{price:.4g} per {what}" for price, what in ((task, "solved task"), (point, "point of reward")) if price]
    return ", ".join([f"{summary['cost_total']:.4g}", *each])


logger = logging.getLogger("penstock.run")
WRITE_EVERY_S = 5.0
AGAIN, EVALUATION, UNFINISHED = "sampled again", "evaluation", "unfinished"
TOKENS = "tokens"
Amounts = Mapping[str, float]


DEVICES = {"rollout": "rollout_s", "trainer": "trainer_s"}
"""Roles with devices → the resource of their time."""


class EndReports:
    """Reports of a head on the processes that it started and that have ended, and on those that outlived their head."""

    def __init__(self, members: Sequence[SupervisedRole], logs: Path, *, in_turns: bool = False) -> None:
        """`in_turns`: servers and trainer use the same devices, and nothing is reported: what one of them did not
        report may be the other's."""
        self._members, self._logs, self._in_turns = members, logs, in_turns
        self._unsent: list[UsageReport] = []

    async def send(self, queue: TransferQueue) -> None:
        """Report those that have ended since the last call. Raises `QueueError`: the next call tries again."""
        if self._in_turns:
            return
        for member in self._members:
            for ended in member.take_ended():
                self._add(member.spec.name, ended)
        for file in self._logs.glob(f"*{END_SUFFIX}"):
            for line in read_jsonl(file):
                self._add(file.stem, EndedProcess(line["life"], line["device_s"], was_killed=True))
            file.unlink()
        while self._unsent:
            await queue.report_usage(self._unsent[0])
            del self._unsent[0]

    def _add(self, role: str, ended: EndedProcess) -> None:
        if resource := DEVICES.get(role.partition("-")[0]):
            amounts = {KILLED if ended.was_killed else ENDED: {resource: ended.device_s}}
            self._unsent.append(UsageReport(secrets.token_hex(8), f"{role} {ended.life}", amounts))


@dataclass(frozen=True, slots=True)
class Settled:
    """An episode that has ended."""

    account: str
    unreported: float
    """Tokens of its trajectory that no report has named yet: one is late, or was lost with its server."""


class CostAccounts:
    """Follows the ledger of one run; `path` keeps the sums over lives of the head."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._written = -math.inf
        self._number = 0
        """The newest entry that is in the sums."""
        self._sums = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
        """Resource → account → amount."""
        self._running = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
        """Usage of episodes that have not ended: episode → resource → amount."""
        self._settled = OrderedDict[str, Settled]()
        self._steps = OrderedDict[str, tuple[str, float]]()
        """Step of a trainer's rank → the process that trained it last, and its device seconds."""
        self._reported = OrderedDict[str, float]()
        """Life of a server or trainer that has not ended → the device seconds in its reports."""
        try:
            self._read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("accounts of cost begin anew: %s cannot be read: %r", path, error)

    async def follow(self, queue: TransferQueue, idle_cause: str) -> None:
        """Take the new entries into the sums. They are written every `WRITE_EVERY_S`, and then forgotten by the queue.
        `idle_cause`: why rollout servers have no requests now. Raises `QueueError`, `OSError`."""
        while entries := await queue.ledger(self._number):
            for entry in entries:
                self.take(entry, idle_cause)
        if self._clock() - self._written >= WRITE_EVERY_S:
            self._written = self._clock()
            self.write()
            await queue.trim_ledger(self._number)

    def take(self, entry: LedgerEntry, idle_cause: str) -> None:
        """Take one entry into the sums; one that is in them already is passed over."""
        if entry.number <= self._number:
            return
        self._number = entry.number
        if entry.usage is not None:
            self._use(entry.usage, idle_cause)
        if entry.fate is not None:
            for episode, tokens in entry.episodes:
                self._settle(episode, entry.fate, tokens)

    def _use(self, usage: UsageReport, idle_cause: str) -> None:
        life = usage.process.rpartition(" ")[2]
        for name, amounts in usage.amounts.items():
            if name in (ENDED, KILLED):
                self._end(life, KILLED if name == KILLED else SETUP, amounts)
                continue
            self._remember(life, amounts)
            if name.startswith(STEP):
                self._train(usage.process, name, amounts)
            elif "#" not in name:
                cause = "the trainer waits for episodes" if usage.process.startswith("trainer-") else idle_cause
                self._add(f"idle: {cause}" if name == IDLE else name, amounts)
            elif not name.startswith("train/"):
                self._add(EVALUATION, amounts)
            elif name in self._settled:
                self._use_late(name, amounts)
            else:
                for resource, amount in amounts.items():
                    self._running[name][resource] += amount

    def _remember(self, life: str, amounts: Amounts) -> None:
        if used := sum(amounts.get(resource, 0.0) for resource in DEVICES.values()):
            self._reported[life] = self._reported.pop(life, 0.0) + used
            while len(self._reported) > 1024:
                self._reported.popitem(last=False)

    def _end(self, life: str, account: str, used: Amounts) -> None:
        """`used`: all that the process has used of one resource."""
        reported = self._reported.pop(life, 0.0)
        self._add(account, {resource: max(0.0, amount - reported) for resource, amount in used.items()})

    def _train(self, process: str, step: str, amounts: Amounts) -> None:
        """A step that a later life of the trainer trains again was in vain before."""
        rank, _, life = process.partition(" ")
        for resource, amount in amounts.items():
            last_life, last = self._steps.pop(f"{rank} {step}", (life, 0.0))
            if last_life != life:
                self._sums[resource][Fate.TRAINED] -= last
                self._sums[resource]["trained again"] += last
                last = 0.0
            self._steps[f"{rank} {step}"] = (life, last + amount)
            self._sums[resource][Fate.TRAINED] += amount
        while len(self._steps) > 256:
            self._steps.popitem(last=False)

    def _settle(self, episode: str, fate: Fate, tokens: int) -> None:
        if episode in self._settled:
            return
        used: Amounts = self._running.pop(episode, {})
        reported = used.get(TOKENS, 0.0)
        # A trajectory's tokens were sampled, whether or not their server lived to report them.
        unreported = max(0.0, tokens - reported)
        self._settled[episode] = Settled(fate, unreported)
        self._sums[TOKENS][fate] += unreported
        self._book(fate, used, reported - tokens)
        while len(self._settled) > 4096:  # of older ones a report that is late finds no account
            self._settled.popitem(last=False)

    def _use_late(self, episode: str, amounts: Amounts) -> None:
        """Add a report of an episode that has ended, whose trajectory's tokens are in the sums."""
        known, reported = self._settled[episode], amounts.get(TOKENS, 0.0)
        counted = min(reported, known.unreported)
        self._settled[episode] = Settled(known.account, known.unreported - counted)
        self._sums[TOKENS][known.account] -= counted
        self._book(known.account, amounts, reported - counted)

    def _book(self, account: str, amounts: Amounts, again: float) -> None:
        """`again`: tokens that are in no trajectory; other amounts follow the tokens. All attempts of a dead letter are
        its own."""
        tokens = amounts.get(TOKENS, 0.0)
        share = max(0.0, again) / tokens if tokens and account != Fate.DEAD_LETTER else 0.0
        for resource, amount in amounts.items():
            self._sums[resource][account] += amount * (1 - share)
            self._sums[resource][AGAIN] += amount * share

    def _add(self, account: str, amounts: Amounts) -> None:
        for resource, amount in amounts.items():
            self._sums[resource][account] += amount

    def plain(self) -> dict[str, dict[str, float]]:
        """Return resource → account → amount; usage of episodes that still run is `UNFINISHED`."""
        sums = {resource: dict(accounts) for resource, accounts in self._sums.items()}
        for amounts in self._running.values():
            for resource, amount in amounts.items():
                accounts = sums.setdefault(resource, {})
                accounts[UNFINISHED] = accounts.get(UNFINISHED, 0.0) + amount
        return {
            resource: parts
            for resource, accounts in sorted(sums.items())
            if (parts := {name: rounded for name, one in sorted(accounts.items()) if (rounded := round(one, 3)) > 0})
        }

    def cost(self, prices: CostConfig) -> dict[str, float]:
        """Return account → cost so far."""
        costs = defaultdict[str, float](float)
        for resource, accounts in self.plain().items():
            for account, amount in accounts.items():
                costs[account] += amount * prices.of(resource)
        return {account: cost for account, cost in costs.items() if cost}

    def write(self) -> None:
        """Raises `OSError`."""
        state = {
            "accounts": self.plain(),
            "number": self._number,
            "sums": self._sums,
            "running": self._running,
            "settled": {name: [one.account, one.unreported] for name, one in self._settled.items()},
            "steps": self._steps,
            "reported": self._reported,
        }
        write_atomically(self._path, json.dumps(state) + "\n")

    def _read(self, state: Mapping[str, Any]) -> None:
        for target, name in ((self._sums, "sums"), (self._running, "running")):
            for key, amounts in state[name].items():
                target[key].update(amounts)
        self._settled.update((name, Settled(*row)) for name, row in state["settled"].items())
        self._steps.update((name, tuple(row)) for name, row in state["steps"].items())
        self._reported.update(state["reported"])
        self._number = state["number"]
