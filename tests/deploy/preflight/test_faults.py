"""Each fault of settings and rows has a check that finds it and names its fix; `test_machine_faults` has the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.preflight.preflight_support import RECIPE, assert_refused, failed

from penstock.deploy import load_config
from penstock.deploy.preflight.agent import (
    check_lengths,
    check_loop,
    check_prompts,
    check_reward,
    check_score,
    check_search,
    check_template,
)
from penstock.deploy.preflight.data import check_data
from penstock.deploy.preflight.machine import check_threads
from penstock.deploy.preflight.model import check_context, check_model
from penstock.deploy.preflight.network import check_ports, check_weights_host
from penstock.deploy.preflight.routing import check_routing_replay
from penstock.deploy.preflight.sandbox import check_sandbox
from penstock.deploy.preflight.settings import (
    check_algorithm,
    check_capacity,
    check_concurrency,
    check_correction,
    check_sampling,
    check_sinks,
    check_trainable,
    check_training_engine,
    check_training_job,
)
from penstock.deploy.preflight.suite import Asked

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch]
HTTP = "rollout.weight_transport=http"
COMPACTION = ["agent.loop=compaction", "agent.max_response_tokens=9000", "agent.settings.max_summary_tokens=20"]
DISTILLED = ["agent.teachers={'*': {url: 'http://127.0.0.1:9', top_k: 8}}", "trainer.distill.in_advantage=1"]
SEARCH = "tools=[{name: search, settings: {url: 'http://127.0.0.1:9/retrieve'}}]"
MAX_BYTES = "max_bytes = 1000 < groups_per_step × group_size × bytes per token × response tokens = 4 × 2 × 9 ×"

# settings -----------------------------------------------------------------------------------------------------------
SETTINGS: list[tuple[Asked, list[str], str]] = [
    (check_trainable, ["rollout.adapter_rank=8"], "remove it"),
    (check_correction, ["trainer.correction=null"], r"trainer\.correction=truncated_is"),
    (check_algorithm, ["group_size=1"], "2 or more"),
    (
        check_training_engine,
        ["trainer.engine=megatron", "trainer.ranks=3", "trainer.parallel.tensor=2"],
        "must be a multiple",
    ),
    (check_training_job, ["trainer.minibatches=9"], "every minibatch needs a group"),
    (check_training_job, ["trainer.ranks=16"], r"lower trainer\.ranks"),
    (check_training_job, DISTILLED, r"Set trainer\.distill\.in_loss, or agent\.teachers"),
    (check_routing_replay, ["rollout.routing_replay=true"], r"rollout\.routing_replay=false"),
    (check_routing_replay, ["rollout.routing_replay=true", "trainer.compile=true"], r"trainer\.compile=false"),
    (check_lengths, ["agent.max_response_tokens=256"], r"raise rollout\.max_model_len above 256$"),
    (check_lengths, [*COMPACTION, "agent.settings.compact_at=300"], r"lower the lengths in agent\.settings"),
    (check_lengths, ["agent.max_response_tokens=4000"], r"agent\.max_response_tokens below 256$"),
    (check_lengths, [*COMPACTION, "agent.settings.compact_at=0"], r"correct agent\.settings"),
    (check_sampling, ["agent.top_p=0.9"], r"rollout\.truncated_sampling=true"),
    (check_sampling, ["agent.top_k=20"], r"rollout\.truncated_sampling=true"),
    (check_capacity, ["transfer_queue.max_groups=3", "groups_per_step=4"], "max_groups = 3 < groups_per_step = 4"),
    (check_capacity, ["transfer_queue.max_bytes=1000", "groups_per_step=4", "group_size=2"], MAX_BYTES),
    (check_data, ["data.train=generate:calculator/test"], "generators are calculator/train"),
    (check_loop, ["agent.loop=tool_agnt"], "did you mean 'tool_agent'"),
    (check_template, ["tools=[{name: pyton}]"], "correct this entry"),
    (check_template, ["tools=[python, /nowhere/tool.py:Guess]"], "correct this entry"),
    (check_template, ["tools=[{name: python, settings: {x: 1}}]"], "unknown setting 'x'"),
    (check_reward, ["agent.reward=", "tools=[]"], "no loop and no tool gives a reward"),
    (check_reward, ["agent.reward=", "tools=[{name: python}]"], "set agent.reward=FILE"),
    (check_reward, ["agent.reward=/nowhere/no_reward.py:score"], r"/nowhere/no_reward\.py"),
    (check_data, ["data.train=no/such.parquet"], "first lines of a recipe that ships"),
    (check_model, ["model=./no/such/model"], r"config\.json, tokenizer"),
    *(
        (
            check_context,
            [f"rollout.engine={engine}", "rollout.max_model_len=4096"],
            r"rollout\.max_model_len to 1024 or less",
        )
        for engine in ("vllm", "hf")
    ),
    (check_threads, ["trainer.threads=4096"], r"trainer\.threads=\d+ or less"),
    (
        check_ports,
        ["rollout.host=192.0.2.1"],  # TEST-NET-1: nobody has it
        r"set rollout\.host to an address of this machine",
    ),
    (check_ports, [HTTP, "rollout.weights_host=192.0.2.1"], r"set rollout\.weights_host"),
    (check_weights_host, ["rollout.servers=0", HTTP, "transfer_queue.url=redis://queue:6379"], r"0\.0\.0\.0"),
    (check_search, [SEARCH], "penstock search-server"),
]


@pytest.mark.parametrize(("check", "overrides", "fix"), SETTINGS)
def test_settings_that_cannot_work(check: Asked, overrides: list[str], fix: str) -> None:
    assert_refused(check, overrides, fix)


def test_wandb_that_would_be_left_out_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = load_config(RECIPE, ["trainer.sinks=[wandb]"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check = check_sinks(config)
    assert (check.ok, check.warns, check.found.split(",")[0]) == (True, True, "WANDB_API_KEY is not set")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check = check_sinks(config)
    assert not check.warns
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check = check_sinks(config)
    assert check.fix == "pip install 'penstock[wandb]'"


def test_a_missing_package_is_fixed_by_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    check = check_reward(load_config(RECIPE, ["agent.reward=maths"]))
    assert check is not None
    assert check.fix == "pip install 'penstock[math]'"
    assert "pip" not in check.found


@pytest.mark.parametrize(
    ("check", "overrides"),
    [
        (check_correction, ["trainer.correction=null", "max_staleness=0"]),
        (check_lengths, [*COMPACTION, "agent.settings.compact_at=100"]),
        (check_sampling, ["agent.top_p=0.9", "rollout.truncated_sampling=true"]),
        (check_sampling, ["agent.top_k=20", "rollout.truncated_sampling=true"]),
    ],
)
def test_settings_that_work_together(check: Asked, overrides: list[str]) -> None:
    assert failed(check, *overrides) == {}


@pytest.mark.parametrize(
    ("concurrency", "verdict", "found"),
    [
        (96, "ok", "192 episodes at once (2 workers with agent.concurrency=96 each), of 192"),
        (32, "ok", "64 episodes at once (2 workers with agent.concurrency=32 each), of 192"),
        (31, "warn", "62 episodes at once (2 workers with agent.concurrency=31 each), of 192"),
    ],
)
def test_fewer_places_than_staleness_admits(concurrency: int, verdict: str, found: str) -> None:
    """A step of the recipe has 8 groups of 8, and two later ones may be under way."""
    check = check_concurrency(load_config(RECIPE, [f"agent.concurrency={concurrency}"]))
    assert check.verdict == verdict
    assert found in check.found
    assert ("agent.concurrency=96 for each" in check.found + check.fix) == (concurrency < 96)
    assert (check.fix != "") == (verdict == "warn")


# rows ---------------------------------------------------------------------------------------------------------------
GOOD = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "data_source": "calculator",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}
LONG = {**GOOD, "prompt": [{"role": "user", "content": "1+1? " * 400}]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SEEN = {
    **GOOD,
    "prompt": [{"role": "user", "content": "<image>Which colour?"}],
    "images": [f"data:image/png;base64,{PIXEL}"],
}
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0
def no_score(data_source, solution_str, ground_truth, extra_info): pass
"""
BY_SOURCE = "agent.reward=by_data_source"
QUOTAS = ["groups_per_step=4", "transfer_queue.quotas={sums: 1, code: 2}"]
SERVER = ["agent.reward=reward_server", "agent.rewards.settings={url: 'http://127.0.0.1:9', retries: 0}"]


def of_source(*names: str) -> list[dict[str, Any]]:
    return [{**GOOD, "data_source": name} for name in names]


def without(column: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != column}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The overrides that have a dataset of these rows and a file with rewards."""
    monkeypatch.setenv("PENSTOCK_REWARD_TOKEN", "of-the-server")
    (tmp_path / "reward.py").write_text(REWARDS)
    (tmp_path / "of_verl.py").write_text("from verl.tools.base_tool import BaseTool as Tool\n")

    def write(rows: list[dict[str, Any]], overrides: list[str]) -> list[str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [word.replace("FOLDER", str(tmp_path)) for word in overrides]
        return [f"data.train={tmp_path / 'rows.jsonl'}", *words]

    return write


@pytest.mark.parametrize(
    ("check", "rows", "overrides", "fix"),
    [
        (
            check_data,
            [GOOD, without("prompt")],
            [],
            "row 2: column 'prompt' is missing.*; give every row prompt, data_",
        ),
        (check_data, [without("data_source")], [], "row 1: column 'data_source' is missing"),
        (check_data, [GOOD, {**GOOD, "prompt": []}], [], "row 2.*; correct the row"),
        (check_data, [GOOD, {**GOOD, "reward_model": {"ground_truth": 2**100}}], [], "row 2.*reward_model"),
        (
            check_data,
            [{**GOOD, "reward_model": {"style": "rule"}}],
            [],
            r"row 1: reward_model\.ground_truth is missing",
        ),
        (check_data, [SEEN], ["rollout.engine=sglang"], r"rollout\.engine=vllm or hf"),
        (check_prompts, [GOOD, LONG], [], r"rollout\.max_model_len to \d+ or more"),
        (check_prompts, [GOOD, SEEN], [], r"rows\.jsonl, row 2: .*takes no images"),
        (
            check_loop,
            [GOOD, {**GOOD, "agent_name": "someone"}, {**GOOD, "agent_name": "someone"}],
            [],
            r"rows\.jsonl, row 2, column agent_name: unknown agent loop 'someone'.*; correct the column",
        ),
        (check_loop, [GOOD], ["agent.loop=gymnasium"], "gymnasium takes no tools.*has python"),
        (
            check_loop,
            [GOOD],
            ["agent.loop=command", "agent.settings={command: a}", "agent.forks.branches=1"],
            "command keeps more",
        ),
        (
            check_loop,
            [GOOD],
            ["agent.settings={max_secondz: 3}"],
            r"agent\.settings\.max_secondz of ToolAgentLoop: no such setting; did you mean 'max_seconds'",
        ),
        (
            check_loop,
            [GOOD],
            ["agent.loop=command", "tools=[]", "agent.settings={command: agent, sdtin: x}"],
            "did you mean 'stdin'",
        ),
        (check_loop, [GOOD], ["agent.settings={max_seconds: abc}"], "valid number"),
        (check_template, [GOOD], ["tools=[FOLDER/of_verl.py:Tool]"], r"penstock\.tools\.BaseTool"),
        (check_reward, of_source("openai/gsm8k", "elsewhere"), [BY_SOURCE], "no reward for data_source 'elsewhere'"),
        (
            check_reward,
            [GOOD],
            ["agent.reward=FOLDER/reward.py:compute_score", "agent.rewards.settings={bonus: 0.2}"],
            r"compute_score has no parameter 'bonus'.*; correct agent\.rewards\.settings",
        ),
        (check_score, [GOOD], ["agent.reward=FOLDER/reward.py:compute_scores"], "did you mean 'compute_score'"),
        (check_score, [GOOD], ["agent.reward=FOLDER/reward.py:no_score"], "return a finite number"),
        (check_score, [GOOD], SERVER, r"agent\.rewards names"),
        (
            check_capacity,
            of_source("sums", "code", "sums"),
            QUOTAS,
            r"quotas: code 2 \+ sums 1 = 3 < groups_per_step = 4",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on(
    dataset: Callable[..., list[str]], check: Asked, rows: list[dict[str, Any]], overrides: list[str], fix: str
) -> None:
    assert_refused(check, dataset(rows, overrides), fix)


@pytest.mark.parametrize(
    ("check", "rows", "overrides"),
    [
        (check_data, [SEEN], []),
        (check_loop, [GOOD], ["agent.loop=gymnasium", "agent.settings={env: CartPole-v1}", "tools=[]"]),
        (check_loop, [GOOD, {**GOOD, "agent_name": "tool_agent"}], ["agent.loop=gymnasium", "agent.settings={env: a}"]),
        (check_data, [GOOD], ["rollout.engine=sglang"]),
        (
            check_reward,
            of_source("openai/gsm8k", "elsewhere"),
            [BY_SOURCE, "agent.rewards.sources={elsewhere: search_em}"],
        ),
        (check_capacity, of_source("sums", "code"), ["groups_per_step=4", "transfer_queue.quotas={sums: 1}"]),
    ],
)
def test_rows_that_can(
    dataset: Callable[..., list[str]], check: Asked, rows: list[dict[str, Any]], overrides: list[str]
) -> None:
    assert failed(check, *dataset(rows, overrides)) == {}


@pytest.mark.parametrize(("source", "needed"), [("codecontests", True), ("openai/gsm8k", False)])
def test_boxes_are_needed_for_rewards_that_run_code(
    dataset: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, source: str, needed: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ("sandbox" in failed(check_sandbox, *dataset(of_source(source), ["tools=[]", BY_SOURCE]))) is needed
