"""summary.json and reward.png: what a run did, from what it wrote and what the queue counted."""

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

from penstock.common import last_by, read_jsonl, rewrite_jsonl
from penstock.dashboard import flat_rewards
from penstock.deploy.config import RunConfig
from penstock.deploy.lives import LivesTotal
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import Status, TransferQueue, TurnReport, WeightUpdate


async def write_summary(config: RunConfig, run: RunDir, queue: TransferQueue, total: LivesTotal) -> dict[str, Any]:
    """Collect, write and return the summary, of all lives. Also draws the reward curve."""
    rows = last_by(read_jsonl(run.metrics), "step")
    status, updates = await queue.status(), await queue.updates()
    rewrite_jsonl(run.weight_updates, map(asdict, updates))
    turns = await queue.turn_reports() if config.placement.in_turns else []
    if turns:
        rewrite_jsonl(run.turns, map(asdict, turns))
    summary = {
        "name": config.name,
        "steps": len(rows),
        "ended": _why_ended(run),
        "lives": total.lives,
        "wall_s": round(total.wall_s, 1),
        **_learning(rows, read_jsonl(run.evaluations)),
        "rewards_warning": flat_rewards(rows) or None,
        **_accounts(last_by(read_jsonl(run.steps), "step"), status, await queue.held()),
        **_tokens(rows),
        "checkpoints_damaged": rows[-1].get("checkpoints_damaged", 0) if rows else 0,
        **_updates(updates),
        **(_turns(turns) if turns else {}),
        "wait_s": {key: round(seconds, 2) for key, seconds in sorted(status.waits_s.items())},
        "restarts": dict(total.restarts),
    }
    run.summary.write_text(json.dumps(summary, indent=2) + "\n")
    if rows:
        draw_reward(run.plot, rows, read_jsonl(run.evaluations))
    return summary


def _why_ended(run: RunDir) -> str | None:
    """As the trainer said; None where it had not come to an end."""
    return str(json.loads(run.ended.read_text())["why"]) if run.ended.exists() else None


def _learning(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows]
    return {
        "reward_first": _mean(rewards[:3]),
        "reward_last": _mean(rewards[-5:]),
        "eval_reward": evaluations[-1]["reward"] if evaluations else None,
        "eval_episodes": evaluations[-1]["episodes"] if evaluations else 0,
    }


REASONS = {
    "episodes_dropped": "dropped",
    "episodes_filtered": "filtered",
    "episodes_unrewarded": "unrewarded",
    "episodes_buried": "group_failed",
    "episodes_payload_lost": "payload_lost",
}
"""Key in summary.json, which users' scripts read, and the queue's state of an episode."""


def _accounts(steps: list[dict[str, Any]], status: Status, held: set[str]) -> dict[str, Any]:
    """Invariant 2 from the outside: the trainer's own record of what it trained against what the queue acknowledged.

    `lost` = episodes acknowledged as complete − (trained + still held + counted under a reason).
    """
    trained = Counter(episode for row in steps for episode in row["episodes"])
    episodes = status.episodes
    reasons = {key: episodes.get(state, 0) for key, state in REASONS.items()}
    still_held = len(held - set(trained))
    return {
        "episodes": episodes.get("completed", 0),
        "episodes_trained": len(trained),
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
    """Of the newest `KEPT_TURN_REPORTS`."""
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
