"""The end of a run: summary.json, reward.png, and the last lines on the terminal."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common import last_by, read_jsonl, rewrite_jsonl, write_atomically
from penstock.dashboard import decoder_of, reward_warning, whole_letter
from penstock.deploy.config import RunConfig
from penstock.deploy.run.accounts import CostAccounts, cost_figures, describe_cost, idle_cause, shares
from penstock.deploy.run_dir import LivesTotal, RunDir
from penstock.transfer_queue import Status, TransferQueue, TurnReport, WeightUpdate


async def write_summary(
    config: RunConfig, run: RunDir, queue: TransferQueue, total: LivesTotal, failed: Sequence[str] = ()
) -> dict[str, Any]:
    """Collect, write and return the summary, of all lives. Also draws the reward curve.

    `failed`: roles that failed for good in this life.
    """
    rows = last_by(read_jsonl(run.metrics), "step")
    status, updates = await queue.status(), await queue.updates()
    accounts = CostAccounts(run.accounts)
    await accounts.follow(queue, idle_cause(status, config))
    rewrite_jsonl(run.weight_updates, map(asdict, updates))
    decode = decoder_of(config.model)
    rewrite_jsonl(run.dead_letters, [whole_letter(letter, decode) for letter in await queue.dead_letters()])
    turns = await queue.turn_reports() if config.placement.in_turns else []
    if turns:
        rewrite_jsonl(run.turns, map(asdict, turns))
    summary = {
        "name": config.name,
        "steps": len(rows),
        "ended": json.loads(run.ended.read_text())["why"] if run.ended.exists() else None,
        "lives": total.lives,
        "wall_s": round(total.wall_s, 1),
        **_learning(rows, read_jsonl(run.evaluations)),
        "rewards_warning": reward_warning(rows) or None,
        **_accounts(last_by(read_jsonl(run.steps), "step"), status, await queue.held()),
        **_tokens(rows),
        "checkpoints_damaged": rows[-1].get("checkpoints_damaged", 0) if rows else 0,
        **_updates(updates),
        **(_turns(turns) if turns else {}),
        "wait_s": {key: round(seconds, 2) for key, seconds in sorted(status.waits_s.items())},
        "accounts": accounts.plain(),
        **cost_figures(accounts.cost(config.costs), rows),
        "restarts": dict(total.restarts),
        "roles_failed": list(failed),
    }
    write_atomically(run.summary, json.dumps(summary, indent=2) + "\n")
    if rows:
        draw_reward(run.plot, rows, read_jsonl(run.evaluations))
    return summary


def describe_end(summary: dict[str, Any], run: RunDir) -> str:
    """The results of a run that ended, for a terminal: one line per subject; the first says how the run ended."""
    get = summary.get
    lost = {
        "lost": get("lost"),
        "trained twice": get("trained_twice"),
        "failed": get("episodes_failed"),
        "too old": get("episodes_dropped"),
        "payload lost": get("episodes_payload_lost"),
        "update lost with a checkpoint": get("episodes_update_lost"),
        "finished in groups that were given up": get("episodes_buried"),
    }
    waits = {
        "agent workers for the trainer": "agent:admission",
        "agent workers for a server": "agent:server",
        "the trainer for episodes": "trainer:batch",
    }
    first, last = _ends(get("steps", 0))
    accounts = get("accounts", {})
    restarts = ", ".join(f"{role} {times}" for role, times in get("restarts", {}).items() if times)
    lines = {
        "reward": f"{_rounded(get('reward_first'))} -> {_rounded(get('reward_last'))} (first {first}, last"
        f" {last} of {get('steps')} steps)",
        "evaluation": f"{_rounded(get('eval_reward'))} over {get('eval_episodes'):.0f} episodes"
        + (f"; {get('eval_failed'):.0f} more failed" if get("eval_failed") else "")
        if get("eval_episodes")
        else "",
        "episodes": ", ".join([f"{get('episodes_trained')} trained", *(f"{n} {what}" for what, n in lost.items() if n)])
        + ("" if get("lost") or get("trained_twice") else "; none lost, none trained twice"),
        "tokens": f"{get('tokens_sampled', 0):,} of trained episodes, at most {get('staleness_max')} versions old"
        + (f"; of all, {shares(accounts['tokens'])}" if accounts.get("tokens") else ""),
        **{resource: shares(of_one) for resource, of_one in accounts.items() if resource != "tokens"},
        "cost": describe_cost(summary) if "cost_total" in summary else "",
        "updates": f"{get('weight_updates')} of weights; requests paused {get('pause_ms_p99')} ms (p99)",
        "waits": ", ".join(f"{who} {get('wait_s', {}).get(key, 0):.0f} s" for who, key in waits.items()),
        "restarts": restarts or "none",
        "failed": ", ".join(get("roles_failed", ())),
        "warning": get("rewards_warning"),
        "files": f"{run.root}: {run.summary.name}, {run.plot.name}, {run.trajectories.name}/",
    }
    head = f"{get('name')}: {get('ended') or 'ended'}, after {get('wall_s', 0):.0f} s"
    return "\n".join([head, *(f"  {subject:11}{line}" for subject, line in lines.items() if line)])


def _ends(steps: int) -> tuple[int, int]:
    """(first, last) steps whose mean rewards are compared: none is in both."""
    half = max(1, steps // 2)
    return min(3, half), min(5, half)


def _rounded(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _learning(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["episodes"]]
    first, last = _ends(len(rewards))
    return {
        "reward_first": _mean(rewards[:first]),
        "reward_last": _mean(rewards[-last:]),
        "eval_reward": evaluations[-1]["reward"] if evaluations else None,
        "eval_episodes": evaluations[-1]["episodes"] if evaluations else 0,
        "eval_failed": evaluations[-1].get("failed", 0) if evaluations else 0,
    }


def _accounts(steps: list[dict[str, Any]], status: Status, stored: set[str]) -> dict[str, Any]:
    """Invariant 2 from the outside: the trainer's own record of what it trained against what the queue acknowledged.

    `lost` = episodes acknowledged as complete − (trained + still held + counted under a reason).
    """
    trained = Counter(episode for row in steps for episode in row["episodes"])
    unlearned = {episode for row in steps if row.get("update_lost") for episode in row["episodes"]}
    episodes = status.episodes
    reasons = {
        "episodes_dropped": episodes.get("dropped", 0),
        "episodes_filtered": episodes.get("filtered", 0),
        "episodes_unrewarded": episodes.get("unrewarded", 0),
        "episodes_buried": episodes.get("group_failed", 0),
        "episodes_payload_lost": episodes.get("payload_lost", 0),
    }
    still_held = len(stored - set(trained))
    return {
        "episodes": episodes.get("completed", 0),
        "episodes_trained": len(trained) - len(unlearned),
        "episodes_update_lost": len(unlearned),
        "episodes_held": still_held,
        **reasons,
        "episodes_failed": episodes.get("failed", 0),
        "episodes_retried": episodes.get("retried", 0),
        "leases_expired": episodes.get("expired", 0),
        "trained_twice": sum(1 for times in trained.values() if times > 1),
        "lost": episodes.get("completed", 0) - len(trained) - still_held - sum(reasons.values()),
    }


def _tokens(rows: list[dict[str, Any]]) -> dict[str, Any]:
    exact = [row for row in rows if row.get("logprob_abs_diff_tokens")]
    weights = [row["logprob_abs_diff_tokens"] for row in exact]
    return {
        "tokens_sampled": sum(row["tokens_sampled"] for row in rows),
        "requests_continued_over_update": _total(rows, "calls_continued_over_update"),
        "requests_resumed": _total(rows, "calls_resumed"),
        "token_mismatches": _total(rows, "token_mismatches"),
        "staleness_max": max((row["staleness_max"] for row in rows), default=0),
        "staleness_mean": _mean([row["staleness_mean"] for row in rows]),
        "logprob_abs_diff_mean": (
            float(np.average([row["logprob_abs_diff_mean"] for row in exact], weights=weights)) if exact else None
        ),
        "kl_first_step": rows[0].get("kl_k3") if rows else None,
        "logprob_abs_diff_max": max((row["logprob_abs_diff_max"] for row in exact), default=None),
    }


def _updates(updates: Sequence[WeightUpdate]) -> dict[str, Any]:
    pauses = [1000 * update.pause_s for update in updates]
    return {
        "weight_updates": len(updates),
        "requests_in_flight_at_updates": sum(update.in_flight for update in updates),
        "pause_ms_p50": round(float(np.percentile(pauses, 50)), 2) if pauses else None,
        "pause_ms_p99": round(float(np.percentile(pauses, 99)), 2) if pauses else None,
    }


def _turns(reports: Sequence[TurnReport]) -> dict[str, Any]:
    """Return figures of the newest `KEPT_TURN_REPORTS` turns."""
    begun, holding = Counter[str](), set[str]()
    for report in reports:
        begun[report.side] += report.holds and report.holder not in holding
        (holding.add if report.holds else holding.discard)(report.holder)
    return {
        "turns": {"engine": begun["engine"], "trainer": begun["trainer"]},
        "device_bytes_claimed_max": max(report.total_bytes for report in reports),
        "device_bytes_used_max": max(report.total_used for report in reports),
    }


def _total(rows: list[dict[str, Any]], metric: str) -> int:
    """Sum over all trained episodes of a metric that steps hold as a mean."""
    return round(sum(row.get(f"episode/{metric}", 0.0) * row["episodes"] for row in rows))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def load_plotting() -> None:
    """Half of the time that the picture takes, and of no use to anything else: for while the run's processes stop."""
    with contextlib.suppress(ImportError):  # `draw_reward` says so
        importlib.import_module("matplotlib.backends.backend_agg")


def draw_reward(path: Path, rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    """The reward curve, evaluations on it, and staleness below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # without pyplot, which looks for windows and doubles the time of the import

    figure = Figure(figsize=(8, 6))
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = [row["step"] for row in rows]
    top.plot(steps, [row["reward"] for row in rows], label="training reward")
    if evaluations:
        top.plot([e["version"] for e in evaluations], [e["reward"] for e in evaluations], "o", label="evaluation")
    top.set(ylabel="mean reward", ylim=(0, 1.05))
    top.legend(loc="lower right")
    bottom.plot(steps, [row["staleness_mean"] for row in rows], label="mean")
    bottom.step(steps, [row["staleness_max"] for row in rows], where="mid", label="max")
    bottom.set(ylabel="staleness", xlabel="step")
    bottom.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
