"""Recipes of tinker-cookbook, unmodified, against `penstock serve` with a small model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ROOT, SDK, Served, serving

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""The cookbook knows templates by names of the hub; a folder of that name has the small model's tokenizer."""
RECIPES = "tinker_cookbook.recipes"
RL = ("env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=8", "lora_rank=8", "max_steps=3")
WORDS = {
    "supervised": (f"{RECIPES}.chat_sl.train", f"dataset={SDK}/tinker_cookbook/example_data/conversations.jsonl",
                   "batch_size=4", "max_length=128", "lora_rank=8", "max_steps=3", "save_every=2"),
    "one turn": (f"{RECIPES}.math_rl.train", *RL, "loss_fn=ppo", "num_substeps=2"),
    "asynchronous": (f"{RECIPES}.math_rl.train", *RL, "loss_fn=cispo", "max_steps_off_policy=2"),
    "several turns": (f"{RECIPES}.multiplayer_rl.guess_number.train", "renderer_name=qwen3_instruct", "group_size=2",
                      "batch_size=2", "max_tokens=4", "max_steps=1"),
    "preferences": (f"{RECIPES}.preference.dpo.train", "renderer_name=qwen3_instruct", "dataset=hhh", "batch_size=4",
                    "max_length=128", "max_steps=2"),
    "distillation": (f"{RECIPES}.distillation.on_policy_distillation", f"teacher_model={MODEL}", "dataset=deepmath",
                     "group_size=2", "groups_per_batch=2", "max_tokens=8", "lora_rank=8", "max_steps=2"),
}  # fmt: skip
pytestmark = [
    pytest.mark.deep,
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (SDK / "complete").exists(), reason="the SDK is missing: scripts/setup-tinker installs it"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "Qwen").mkdir()
    model = folder / MODEL
    shutil.copytree(ROOT / "recipes" / "calculator" / "model", model)
    config = json.loads((model / "config.json").read_text())
    # The model reads letters: ten turns are long.
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    write_data(folder)
    with serving(folder, MODEL, f"model={model}", "rollout.max_model_len=4096") as opened:
        yield opened


def write_data(folder: Path) -> None:
    """Datasets of the hub, by their names as folders."""
    source = random.Random(3)
    questions = [f"{source.randrange(90)} + {source.randrange(90)}" for _ in range(16)]
    pairs = [
        {"chosen": f"\n\nHuman: {one}\n\nAssistant: {eval(one)}", "rejected": f"\n\nHuman: {one}\n\nAssistant: no"}
        for one in questions
    ]
    math = [{"question": one, "final_answer": str(eval(one))} for one in questions]
    for name, rows in (("Anthropic/hh-rlhf", pairs), ("zwhe99/DeepMath-103K", math)):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("recipe", WORDS)
def test_a_recipe_runs_to_its_end(served: Served, recipe: str, tmp_path: Path) -> None:
    module, *words = WORDS[recipe]
    common = (f"model_name={MODEL}", f"log_path={tmp_path}", "behavior_if_log_dir_exists=delete")
    served.output(served.run("-m", module, *common, *words))
    lines = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert lines[-1]["state_path"].endswith("/weights/final")
