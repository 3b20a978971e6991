"""Settings, rows, rewards and loops."""

from __future__ import annotations

from collections.abc import Sequence

from tests.deploy.preflight.planting import GOOD_ROW, Place, planted

from penstock.deploy.preflight.agent import check_loop, check_prompts, check_score
from penstock.deploy.preflight.data import check_data
from penstock.deploy.preflight.routing import check_routing_replay
from penstock.deploy.preflight.settings import check_correction, check_training_job


@planted(check_correction, "trainer.correction", r"trainer\.correction=truncated_is")
def stale_tokens_without_a_correction(place: Place) -> Sequence[str]:
    return ["trainer.correction=null"]


@planted(check_training_job, "trainer settings", r"every minibatch needs a group")
def more_minibatches_than_groups(place: Place) -> Sequence[str]:
    return ["trainer.minibatches=9"]


@planted(check_training_job, "trainer settings", r"lower trainer\.ranks")
def ranks_that_would_never_have_a_group(place: Place) -> Sequence[str]:
    return ["trainer.ranks=16"]


@planted(check_training_job, "trainer settings", r"Set trainer\.distill\.in_loss, or agent\.teachers")
def likeliest_ids_for_an_advantage(place: Place) -> Sequence[str]:
    return ["agent.teachers={'*': {url: 'http://127.0.0.1:9', top_k: 8}}", "trainer.distill.in_advantage=1"]


@planted(check_routing_replay, "rollout.routing_replay", r"rollout\.routing_replay=false")
def experts_of_a_model_that_has_none(place: Place) -> Sequence[str]:
    return ["rollout.routing_replay=true"]


@planted(check_routing_replay, "rollout.routing_replay", r"trainer\.compile=false")
def experts_for_routers_that_are_compiled(place: Place) -> Sequence[str]:
    return ["rollout.routing_replay=true", "trainer.compile=true"]


@planted(check_data, "data", r"row 2: column 'prompt' is missing")
def a_row_without_a_prompt(place: Place) -> Sequence[str]:
    return [place.rows(GOOD_ROW, {name: value for name, value in GOOD_ROW.items() if name != "prompt"})]


@planted(check_data, "data", r"row 1: reward_model\.ground_truth is missing")
def a_row_without_a_truth(place: Place) -> Sequence[str]:
    return [place.rows({**GOOD_ROW, "reward_model": {"style": "rule"}})]


@planted(check_data, "data", r"generators are calculator/train")
def a_generator_that_does_not_exist(place: Place) -> Sequence[str]:
    return ["data.train=generate:calculator/test"]


@planted(check_prompts, "prompts", r"rollout\.max_model_len to \d+ or more")
def a_prompt_that_leaves_no_room(place: Place) -> Sequence[str]:
    long = {**GOOD_ROW, "prompt": [{"role": "user", "content": "1+1? " * 400}]}
    return [place.rows(GOOD_ROW, long)]


@planted(check_score, "reward of a row", r"did you mean 'compute_score'")
def a_reward_function_misspelt(place: Place) -> Sequence[str]:
    file = place.file(
        "reward.py", "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    return [place.rows(GOOD_ROW), f"agent.reward={file}:compute_scores"]


@planted(check_score, "reward of a row", r"return a finite number")
def a_reward_function_that_returns_nothing(place: Place) -> Sequence[str]:
    file = place.file("reward.py", "def compute_score(data_source, solution_str, ground_truth, extra_info): pass\n")
    return [place.rows(GOOD_ROW), f"agent.reward={file}:compute_score"]


@planted(check_score, "reward of a row", r"agent\.rewards names")
def a_reward_server_that_is_away(place: Place) -> Sequence[str]:
    place.monkeypatch.setenv("PENSTOCK_REWARD_TOKEN", "of-the-server")
    settings = "{url: 'http://127.0.0.1:9', retries: 0}"
    return [place.rows(GOOD_ROW), "agent.reward=reward_server", f"agent.rewards.settings={settings}"]


@planted(check_loop, "agent.loop", r"did you mean 'tool_agent'")
def a_loop_misspelt(place: Place) -> Sequence[str]:
    return ["agent.loop=tool_agnt"]


@planted(check_loop, "agent.loop", r"unknown agent loop 'someone'")
def a_row_that_names_a_loop_nobody_has(place: Place) -> Sequence[str]:
    return [place.rows(GOOD_ROW, {**GOOD_ROW, "agent_name": "someone"})]
