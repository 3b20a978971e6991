"""docs/extend/algorithm.md : every example trains a step, tables are complete, own files work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model
from tests.trainer.trainer_support import make_trajectory

from penstock.common import Registry, options_of
from penstock.deploy import load_config
from penstock.trainer import Learner, Ranks, TrainerConfig, check_algorithm, make_step_batch
from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.corrections import CORRECTIONS
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.filters import FILTERS
from penstock.trainer.losses import LOSSES
from penstock.transfer_queue import Batch

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extend/algorithm.md").read_text()
COMMANDS = [line for line in re.sub(r"\\\n\s+", "", PAGE).splitlines() if line.startswith("penstock run ")]
FILES = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ranks():
    opened = Ranks.open(timeout_s=30)
    yield opened
    opened.close()


def one_step(config: TrainerConfig, model: str, ranks: Ranks) -> dict[str, Any]:
    engine = FSDPEngine(model, config, ranks)
    learner = Learner(config, engine, ranks)
    groups = [[make_trajectory(f"train/{g}", m, 9) for m in range(4)] for g in range(2)]
    step = config.critic.warmup_steps + 9
    names = [[t.episode_id for t in group] for group in groups]
    batch = make_step_batch(Batch(step, names), [0, 1], [t for g in groups for t in g], step, engine.limits)
    scored = learner.score(batch)
    return learner.update(batch, scored, learner.advantages(batch, scored))


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda line: line.removeprefix("penstock run recipes/calculator.yaml ")
)
def test_every_example_trains(command: str, model: str, ranks: Ranks) -> None:
    _, _, recipe, *overrides = shlex.split(command)
    config = load_config(ROOT / recipe, overrides)
    check_algorithm(config.trainer, config.group_size)
    assert config.max_staleness == 0 or config.trainer.correction is not None
    metrics = one_step(config.trainer, model, ranks)
    assert metrics["updates"] == config.trainer.minibatches
    assert metrics["loss"] == metrics["loss"], "not NaN"


REGISTRIES: list[Registry[Any]] = [ADVANTAGES, LOSSES, CORRECTIONS, FILTERS]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_the_tables_have_every_name_and_setting(registry: Registry[Any]) -> None:
    for name in registry.names():
        settings = ", ".join(f"`{key}` {value}" for key, value in options_of(registry.get(name)).items())
        row = rf"^\| `{name}` \|.*\| {re.escape(settings)} ?\|$"
        assert re.search(row, PAGE, re.MULTILINE), f"{name}: no row that ends with | {settings} |"


def test_every_algorithm_has_an_example() -> None:
    used = " ".join(COMMANDS)
    for option, registry in zip(("advantage", "loss", "correction", "filter"), REGISTRIES, strict=True):
        for name in registry.names():
            assert f"trainer.{option}={name}" in used, name


def test_files_of_your_own(model: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = TrainerConfig(
        advantage="median:median_baseline",
        advantage_options={"scale": 2.0},
        loss="signed:signed",
        loss_options={"step": 0.5},
    )
    check_algorithm(config, group_size=4)
    assert 0 < one_step(config, model, ranks)["positive_share"] < 1
