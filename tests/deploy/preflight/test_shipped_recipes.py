"""The parts of every shipped recipe fit together; no GPU is needed to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy.config import load_config
from penstock.deploy.preflight.agent import check_lengths
from penstock.deploy.preflight.settings import check_algorithm, check_correction, check_sampling, check_training_engine

RECIPES = Path(__file__).parents[3] / "recipes"
FILES = [path for path in [*RECIPES.glob("*.yaml"), *RECIPES.glob("*/*.yaml")] if path.name != "sandbox.yaml"]
"""Without settings of sandbox servers, which are no recipes."""
CHECKS = (check_algorithm, check_correction, check_lengths, check_sampling, check_training_engine)

pytestmark = [pytest.mark.recipes, pytest.mark.torch]


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: str(path.relative_to(RECIPES)))
def test_the_parts_of_a_recipe_fit_together(path: Path) -> None:
    config = load_config(path)
    answers = [check(config) for check in CHECKS]
    assert [one for one in answers if one is not None and not one.ok] == []
    assert config.trainer.micro_batch_tokens >= config.rollout.max_model_len, "the longest row fits into a pack"
