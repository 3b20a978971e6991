"""A pretrained model learns: SmolLM2-135M-Instruct, with LoRA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.deploy.conftest import LivingRun
from tests.recipes.conftest import RECIPES, assert_learned

pytestmark = [
    *(pytest.mark.deep, pytest.mark.timeout(1800)),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch),
]


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    command = [sys.executable, "-m", "penstock.deploy.cli", "model", "fetch", "smollm2-135m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {done.stderr}")


def test_a_pretrained_model_learns_to_add_with_lora(start_run: Callable[..., LivingRun]) -> None:
    settings = ("trainer.lora.rank=16", "trainer.lr=1e-3", "trainer.steps=16", "data.eval=null")
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.7", "trainer.stop.window=3")
    run = start_run("sums", *settings, *goal, recipe=RECIPES / "smollm2" / "sums.py")
    assert_learned(run, window=3, first_most=0.45, last_least=0.6, growth=2.0)
