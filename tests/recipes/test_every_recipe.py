"""Every recipe that is shipped loads, fits together, and `--dry-run` tells what it means; no GPU is needed for that."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from penstock.agent_loops import load_object
from penstock.agent_loops.rewards import load_reward
from penstock.deploy import load_config, load_sandbox, parse_config, run_recipe
from penstock.testing import FakeSandbox
from penstock.tools import SweSettings, close_tools, make_tools

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = [path for path in [*RECIPES.glob("*.yaml"), *RECIPES.glob("*/*.yaml")] if path.name != "sandbox.yaml"]
"""Without settings of sandbox servers, which are no recipes."""
ALL = sorted(str(path.relative_to(RECIPES)) for path in FILES)
SIZES = ("cpu", "gpu1", "gpu8", "gpu64")
MADE_LATER = {"agent.teachers.*", "data", "model", "rollout.engine", "sandbox"}
"""What a recipe's page has people make or install first."""
GPU_MACHINES = {"moe_megatron.yaml": {"gpus", "model size"}, "harbor/agent.yaml": {"gpus", "model size"}}
"""What a machine without GPUs lacks for a recipe that is not named for them."""

pytestmark = pytest.mark.recipes


@pytest.mark.parametrize("name", ["retool", "search_r1"])
def test_a_recipe_has_a_page_and_every_size(name: str) -> None:
    assert {path.stem for path in (RECIPES / name).glob("*.yaml")} - {"learn"} == set(SIZES)
    page = (RECIPES / name / "README.md").read_text(encoding="utf-8")
    assert [size for size in SIZES if f"{size}.yaml" not in page] == []


def test_settings_of_sandbox_servers_are_sound() -> None:
    for path in RECIPES.glob("*/sandbox.yaml"):
        assert load_sandbox(path, []).max_boxes >= 1


@pytest.mark.parametrize("name", [name for name in ALL if "gpu" not in name])
def test_dry_run_prints_the_tree_and_what_it_means(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_recipe(RECIPES / name, [], resume=False, dry_run=True)
    printed = capsys.readouterr()
    refused = set(re.findall(r"^([a-z.* ]+): .*\n  fix: ", printed.err, re.MULTILINE))
    assert refused <= MADE_LATER | GPU_MACHINES.get(name, set())
    assert status == (2 if refused else 0), printed.err
    assert parse_config(yaml.safe_load(printed.out), "printed") == load_config(RECIPES / name)
    assert "tasks in flight" in " ".join(printed.err.split())


@pytest.mark.parametrize("name", ALL)
async def test_its_reward_and_tools_can_be_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(RECIPES / name)
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")
    sandbox = FakeSandbox()
    reward, tools = (
        load_reward(config.agent, Path.cwd(), sandbox),
        make_tools(config.tools, sandbox, partial(load_object, recipe_dir=Path.cwd())),
    )
    await close_tools(tools.values())
    if reward is not None:
        await reward.close()


@pytest.mark.torch
def test_the_large_mixture_of_experts_fits_megatron() -> None:
    from penstock.trainer.engines.megatron import check_model

    config = load_config(RECIPES / "moe_megatron.yaml")
    qwen3_30b = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128}
    assert config.trainer.engine == "megatron"
    check_model(SimpleNamespace(**qwen3_30b, vocab_size=151_936), config.trainer.parallel, config.model)
    assert config.groups_per_step >= config.trainer.ranks // config.trainer.parallel.layout.ranks


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("swe/")])
def test_repairing_programs_has_time_and_room_for_its_tests(name: str) -> None:
    config = load_config(RECIPES / name)
    (tools,) = config.tools
    settings = SweSettings(**tools.settings)
    assert tools.timeout_s <= config.sandbox.run_timeout_s
    assert settings.test_timeout_s <= settings.tests_timeout_s
    agent = config.agent
    assert agent.max_new_tokens <= agent.max_response_tokens < config.rollout.max_model_len, "and room for the prompt"
    assert agent.episode_deadline_s <= config.trainer.batch_timeout_s
    assert config.trainer.ranks % config.trainer.parallel.layout.ranks == 0
    assert agent.workers * agent.concurrency <= config.sandbox.max_boxes or config.sandbox.max_boxes >= 32


def test_the_boxes_of_64_gpus_are_those_of_their_servers() -> None:
    server, run = load_sandbox(RECIPES / "swe/sandbox.yaml"), load_config(RECIPES / "swe/gpu64.yaml").sandbox
    limits = [(one.memory_mb, one.tmp_mb, one.run_timeout_s) for one in (server, run)]
    assert limits[0] == limits[1]
