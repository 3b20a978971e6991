import json
from pathlib import Path

from tests.deploy.conftest import RECIPE

from penstock.common import last_by, read_jsonl
from penstock.deploy import RunDir, limits_of, load_config
from penstock.deploy.run.report import _accounts, _tokens, _updates, write_summary
from penstock.deploy.run_dir import LivesFile
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Status, WeightUpdate


def status(**episodes: int) -> Status:
    return Status(version=2, step=2, committed_step=2, groups={}, episodes=episodes, bytes=0, waits_s={}, workers={})


def step(number: int, *episodes: str) -> dict:
    return {"step": number, "episodes": list(episodes)}


def test_summary_accounts_balance() -> None:
    accounts = _accounts([step(0, "a", "b"), step(1, "c")], status(completed=6, dropped=1), held={"c", "d", "e"})
    assert accounts["lost"] == 0
    assert accounts["trained_twice"] == 0
    assert accounts["episodes_held"] == 2


def test_a_missing_episode_is_lost_and_a_repeated_one_is_seen() -> None:
    accounts = _accounts([step(0, "a", "b"), step(1, "a")], status(completed=4), held=set())
    assert accounts["lost"] == 2
    assert accounts["trained_twice"] == 1


def test_summary_replayed_step_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    lines = [json.dumps(step(0, "a")), json.dumps(step(1, "b")), json.dumps(step(1, "b"))]
    file.write_text("\n".join(lines) + '\n{"step": 2, "epis')
    assert last_by(read_jsonl(file), "step") == [step(0, "a"), step(1, "b")]


def test_summary_weights_logprob_difference_by_tokens() -> None:
    common = {"tokens_sampled": 10, "staleness_max": 1, "staleness_mean": 0.5, "episodes": 4}
    rows = [
        {**common, "logprob_abs_diff_tokens": 30, "logprob_abs_diff_mean": 0.1, "logprob_abs_diff_max": 0.2},
        {**common, "logprob_abs_diff_tokens": 10, "logprob_abs_diff_mean": 0.5, "logprob_abs_diff_max": 0.6},
        {**common, "logprob_abs_diff_tokens": 0, "logprob_abs_diff_mean": None, "logprob_abs_diff_max": None},
    ]
    tokens = _tokens(rows)
    assert abs(tokens["logprob_abs_diff_mean"] - 0.2) < 1e-12
    assert tokens["logprob_abs_diff_max"] == 0.6
    assert tokens["tokens_sampled"] == 30


def test_pauses_are_in_milliseconds() -> None:
    updates = [WeightUpdate("s", v, pause_s=0.01 * v, fetch_s=0, load_s=0, in_flight=3) for v in (1, 2, 3)]
    figures = _updates(updates)
    assert figures["weight_updates"] == 3
    assert figures["pause_ms_p50"] == 20.0
    assert figures["requests_in_flight_at_updates"] == 9


async def test_summary_counts_all_lives_of_a_resumed_run(tmp_path: Path) -> None:
    now = 1000.0
    config = load_config(RECIPE, ["name=mine", f"runs_dir={tmp_path}"])
    run = RunDir.of(config)
    run.root.mkdir()
    killed = LivesFile(run.lives, lambda: now)
    now += 70
    killed.write({"trainer": 2, "agent-0": 0})  # and then its supervisor is killed
    now += 500
    last = LivesFile(run.lives, lambda: now)
    now += 30
    last.write({"trainer": 1})
    now += 1
    queue = MemoryTransferQueue()
    await queue.create_run(limits_of(config), "")
    summary = await write_summary(config, run, queue, last.total({"trainer": 1, "rollout-0": 3}))
    assert summary == json.loads(run.summary.read_text())
    assert (summary["lives"], summary["wall_s"]) == (2, 101.0), "the time between them is not the run's"
    assert summary["restarts"] == {"trainer": 3, "agent-0": 0, "rollout-0": 3}


def test_a_life_that_is_killed_in_its_first_seconds_counts(tmp_path: Path) -> None:
    now = 1000.0
    killed = LivesFile(tmp_path / "lives.json", lambda: now)
    now += 1
    killed.write({"trainer": 0})
    assert LivesFile(tmp_path / "lives.json").total({}).lives == 2


def test_a_damaged_lives_file_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "lives.json").write_text('[{"wall_s": 1')
    assert LivesFile(tmp_path / "lives.json").total({}).lives == 1
