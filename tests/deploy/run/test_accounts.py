"""Accounts of cost: nothing that servers, workers and trainer report is lost or counted twice, whatever is killed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deploy.conftest import RECIPE

from penstock.deploy import ConfigError, limits_of, load_config
from penstock.deploy.run.accounts import CostAccounts, EndReports, cost_figures, describe_cost
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import ENDED, IDLE, KILLED, SETUP, Fate, LedgerEntry, UsageReport

NEVER = Path("/nonexistent/accounts.json")


def used(number: int, amounts: Mapping[str, Mapping[str, float]], process: str = "rollout-0 1") -> LedgerEntry:
    return LedgerEntry(number, UsageReport(str(number), process, amounts))


def ended(number: int, fate: Fate, **episodes: int) -> LedgerEntry:
    """`episodes`: member of the task ``train/0`` → sampled tokens of its trajectory."""
    rows = [(f"train/0#{name.removeprefix('m')}", tokens) for name, tokens in episodes.items()]
    return LedgerEntry(number, fate=fate, episodes=rows)


def accounts_of(*entries: LedgerEntry, idle: str = "the trainer is behind") -> dict[str, dict[str, float]]:
    accounts = CostAccounts(NEVER)
    for entry in entries:
        accounts.take(entry, idle)
    return accounts.plain()


def test_what_an_episode_used_beyond_its_trajectory_was_sampled_again() -> None:
    first = used(1, {"train/0#0": {"tokens": 30, "rollout_s": 3.0}, "train/0#1": {"tokens": 10, "rollout_s": 1.0}})
    sums = accounts_of(first, ended(2, Fate.TRAINED, m0=20, m1=10))
    assert sums == {"rollout_s": {"sampled again": 1.0, "trained": 3.0}, "tokens": {"sampled again": 10, "trained": 30}}


def test_what_a_process_used_and_did_not_report_is_booked_at_its_end() -> None:
    reports = [
        used(1, {"train/0#0": {"rollout_s": 3.0}, IDLE: {"rollout_s": 1.0}}),
        used(2, {KILLED: {"rollout_s": 6.5}}),
        used(3, {SETUP: {"trainer_s": 2.0}}, "trainer-0 a"),
        used(4, {SETUP: {"trainer_s": 2.0}}, "trainer-1 a"),
        used(5, {ENDED: {"trainer_s": 7.0}}, "trainer a"),
        used(6, {KILLED: {"trainer_s": 4.0}}, "trainer b"),
    ]
    assert accounts_of(*reports, idle="no task is queued") == {
        "rollout_s": {"idle: no task is queued": 1.0, "killed": 2.5, "unfinished": 3.0},
        "trainer_s": {"killed": 4.0, "start and end": 7.0},
    }


async def test_what_a_process_used_that_outlived_its_head_is_reported_once(tmp_path: Path) -> None:
    for role, device_s in (("trainer", 7.0), ("rollout-0", 2.0), ("agent-0", 1.0)):
        line = {"life": f"a life of {role[0]}", "device_s": device_s}
        (tmp_path / f"{role}.end").write_text(json.dumps(line) + "\n")
    queue = MemoryTransferQueue()
    await EndReports([], tmp_path, in_turns=True).send(queue)
    reports = EndReports([], tmp_path)
    for _ in range(2):
        await reports.send(queue)
    assert sorted((one.usage.process, one.usage.amounts) for one in await queue.ledger(0) if one.usage) == [
        ("rollout-0 a life of r", {KILLED: {"rollout_s": 2.0}}),
        ("trainer a life of t", {KILLED: {"trainer_s": 7.0}}),
    ]
    assert not list(tmp_path.iterdir())


def test_a_report_after_the_end_finds_its_account() -> None:
    early, late = used(1, {"train/0#0": {"tokens": 6}}), used(3, {"train/0#0": {"tokens": 6}})
    assert accounts_of(early, ended(2, Fate.FILTERED, m0=10), late) == {"tokens": {"filtered": 10, "sampled again": 2}}


def test_tokens_that_a_killed_server_did_not_report_were_sampled() -> None:
    """They are in the trajectory: the client had them. A report that comes late after all does not count again."""
    entries = [used(1, {"train/0#0": {"tokens": 6}}), ended(2, Fate.TRAINED, m0=10)]
    assert accounts_of(*entries) == {"tokens": {"trained": 10}}
    late = used(3, {"train/0#0": {"tokens": 5, "rollout_s": 1.0}})
    assert accounts_of(*entries, late) == {
        "rollout_s": {"sampled again": 0.2, "trained": 0.8},
        "tokens": {"sampled again": 1, "trained": 10},
    }


def test_attempts_of_a_dead_letter_and_of_the_unfinished_are_theirs() -> None:
    usage = used(1, {"train/0#0": {"tokens": 6}, "train/0#1": {"tokens": 4}})
    sums = accounts_of(usage, ended(2, Fate.DEAD_LETTER, m0=0))
    assert sums == {"tokens": {"dead letter": 6, "unfinished": 4}}


def test_what_rounds_to_nothing_has_no_account() -> None:
    """Shares of such a resource, in the last lines of a run, would be parts of 0."""
    assert accounts_of(used(1, {IDLE: {"rollout_s": 4e-4}, "train/0#0": {"tokens": 2, "box_s": 1e-4}})) == {
        "tokens": {"unfinished": 2}
    }


def test_what_is_of_no_training_episode_has_an_account_too() -> None:
    server = used(1, {IDLE: {"rollout_s": 2.0}, SETUP: {"rollout_s": 5.0}, "eval/4/0001#0": {"tokens": 8}})
    trainer = used(2, {IDLE: {"trainer_s": 3.0}}, "trainer-0 7")
    assert accounts_of(server, trainer) == {
        "rollout_s": {"idle: the trainer is behind": 2.0, "start and end": 5.0},
        "tokens": {"evaluation": 8},
        "trainer_s": {"idle: the trainer waits for episodes": 3.0},
    }


def test_a_step_that_a_killed_trainer_did_not_save_was_in_vain() -> None:
    lives = [used(n, {"step/4": {"trainer_s": 2.0}}, f"trainer-0 {life}") for n, life in enumerate("aab", start=1)]
    other_rank = used(4, {"step/4": {"trainer_s": 1.0}}, "trainer-1 c")
    assert accounts_of(*lives, other_rank) == {"trainer_s": {"trained": 3.0, "trained again": 4.0}}


@given(st.integers(0, 2**32))
def test_the_sums_are_what_was_reported_or_trained_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    episodes = {f"train/0#{m}": rng.randrange(9) for m in range(6)}
    reports = [
        {name: {"tokens": rng.randrange(7), "box_s": rng.random()} for name in rng.sample(list(episodes), 3)}
        for _ in range(8)
    ]
    fates = [
        LedgerEntry(0, fate=rng.choice(list(Fate)), episodes=[row]) for row in rng.sample(list(episodes.items()), 4)
    ]
    entries = [*(used(0, one) for one in reports), *fates]
    rng.shuffle(entries)
    numbered = [LedgerEntry(n, one.usage, one.fate, one.episodes) for n, one in enumerate(entries, start=1)]
    sums = accounts_of(*(one for entry in numbered for one in (entry, entry)))  # a repeated entry counts once
    reported: dict[str, Counter[str]] = {resource: Counter() for resource in ("tokens", "box_s")}
    for report in reports:
        for name, amounts in report.items():
            for resource, amount in amounts.items():
                reported[resource][name] += amount  # type: ignore[assignment]
    trajectories = {name: n for fate in fates for name, n in fate.episodes}
    tokens = sum(max(reported["tokens"][name], trajectories.get(name, 0)) for name in episodes)
    assert sum(sums.get("tokens", {}).values()) == pytest.approx(tokens, abs=0.01)
    assert sum(sums["box_s"].values()) == pytest.approx(reported["box_s"].total(), abs=0.01)


async def test_a_head_that_is_killed_at_any_time_continues_the_sums(tmp_path: Path) -> None:
    queue, path = MemoryTransferQueue(), tmp_path / "accounts.json"
    await queue.create_run(limits_of(load_config(RECIPE, [])), "")
    for number, killed in enumerate(("never", "before it wrote", "before it trimmed") * 2):
        await queue.report_usage(UsageReport(str(number), "rollout-0 1", {"train/0#0": {"tokens": 3.0}}))
        head = CostAccounts(path)
        if killed == "never":
            await head.follow(queue, "")
            continue
        for entry in await queue.ledger(0):
            head.take(entry, "")
        if killed == "before it trimmed":
            head.write()
    now = [100.0]
    head = CostAccounts(path, lambda: now[0])
    await head.follow(queue, "")
    assert CostAccounts(path).plain() == {"tokens": {"unfinished": 18.0}}
    await queue.report_usage(UsageReport("last", "rollout-0 1", {"train/0#0": {"tokens": 1.0}}))
    await head.follow(queue, "")
    assert len(await queue.ledger(0)) == 1, "it is in no file yet"
    now[0] += 5
    await head.follow(queue, "")
    assert await queue.ledger(0) == [], "what is written is trimmed"
    assert CostAccounts(path).plain() == {"tokens": {"unfinished": 19.0}}


def test_a_file_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "accounts.json"
    for text in ("{", "[]", '{"number": 3}'):
        path.write_text(text)
        accounts = CostAccounts(path)
        accounts.take(used(1, {"train/0#0": {"tokens": 2}}), "")
        assert accounts.plain() == {"tokens": {"unfinished": 2}}


def test_prices_make_costs_and_a_budget_needs_a_price() -> None:
    accounts = CostAccounts(NEVER)
    accounts.take(used(1, {"train/0#0": {"rollout_s": 3600.0, "box_s": 1800.0, "tokens": 5}}), "")
    accounts.take(ended(2, Fate.TRAINED, m0=5), "")
    prices = load_config(RECIPE, ["costs.device_hour=2", "costs.box_hour=1"]).costs
    assert accounts.cost(prices) == {"trained": 2.5}
    with pytest.raises(ConfigError, match="budget needs a price"):
        load_config(RECIPE, ["costs.budget=5"])


def test_costs_are_shared_among_solved_tasks_and_points_of_reward() -> None:
    rows = [{"reward": 0.5, "episodes": 8, "solved_tasks": 2}]
    figures = cost_figures({"trained": 3.0, "filtered": 1.0}, rows)
    assert (figures["cost_total"], figures["cost_per_solved_task"], figures["cost_per_reward_point"]) == (4.0, 2.0, 1.0)
    assert describe_cost(figures) == "4, 2 per solved task, 1 per point of reward"
    assert cost_figures({}, rows) == {}
