"""Layouts that `penstock doctor --gpus` proposes: they fit, the trainer takes them, their bytes are the formulas'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from benchmarks.simulator.mixtures import GPU_GB, MIXTURES, RECIPE, WORDS
from penstock.deploy import RunConfig, app, load_config
from penstock.deploy.preflight.layouts import Layout, exchanged_bytes, find_layouts, received_bytes
from penstock.deploy.preflight.memory_checks import USABLE
from penstock.deploy.preflight.model_shape import ModelShape, shape_from_config
from penstock.trainer import TrainerConfig

CONFIG = load_config(RECIPE, WORDS)
GPU_BYTES = GPU_GB << 30


def shape(name: str) -> ModelShape:
    mixture = shape_from_config(MIXTURES[name])
    assert mixture is not None
    return mixture


def fits(layout: Layout) -> bool:
    return layout.bytes <= USABLE * GPU_BYTES


def test_sizes_are_those_of_the_mixtures_names() -> None:
    billions = {name: round(shape(name).parameters / 1e9) for name in MIXTURES}
    assert billions == {"30B-A3B": 31, "235B-A22B": 235, "744B-A40B": 739}


def test_a_mixture_of_744b_needs_experts_over_ranks_however_many_there_are() -> None:
    layouts = find_layouts(CONFIG, shape("744B-A40B"), 512, GPU_BYTES)
    assert all(map(fits, layouts))
    assert all(one.trainer.parallel.expert > 1 for one in layouts)
    whole = replace(shape("744B-A40B"), expert_count=1)  # nothing to share out
    assert not fits(find_layouts(CONFIG, whole, 512, GPU_BYTES)[0])


@pytest.mark.torch
@pytest.mark.parametrize(("name", "gpus"), [("30B-A3B", 8), ("30B-A3B", 64), ("235B-A22B", 128), ("744B-A40B", 512)])
def test_every_proposal_is_taken_by_the_trainer(name: str, gpus: int) -> None:
    from penstock.trainer.engines import check_engine

    for layout in find_layouts(CONFIG, shape(name), gpus, GPU_BYTES):
        check_engine(layout.trainer)
        assert layout.trainer.ranks // layout.trainer.parallel.context <= layout.groups_per_step


def test_the_words_make_the_layout() -> None:
    config = load_config(RECIPE)
    for layout in find_layouts(config, shape("30B-A3B"), 64, GPU_BYTES):
        changed = load_config(RECIPE, layout.words(config).split())
        assert (changed.trainer, changed.groups_per_step) == (layout.trainer, layout.groups_per_step)


def test_states_on_the_host_are_proposed_only_where_nothing_else_fits() -> None:
    assert not find_layouts(CONFIG, shape("30B-A3B"), 8, GPU_BYTES)[0].trainer.offload
    first = find_layouts(CONFIG, shape("744B-A40B"), 64, GPU_BYTES)[0]
    assert (fits(first), first.trainer.offload) == (True, True)


def test_received_bytes_are_gathers_in_both_passes_and_gradients_in_float32() -> None:
    mixture = shape("235B-A22B")
    dense = mixture.parameters - mixture.experts

    def received(**parallel: int) -> float:
        return received_bytes(mixture, TrainerConfig(ranks=64, dtype="bfloat16", parallel=parallel))

    assert received() == pytest.approx(8 * mixture.parameters * 63 / 64)
    assert received(replicate=8) == pytest.approx(8 * mixture.parameters * 7 / 8)
    assert received(expert=8) == pytest.approx(8 * (dense * 63 / 64 + mixture.experts / 8 * 7 / 8))
    assert received(expert=64) == pytest.approx(8 * dense * 63 / 64), "each rank has its experts"
    low = TrainerConfig(ranks=64, dtype="bfloat16", lora={"rank": 8})
    learning = mixture.lora * 8 / mixture.parameters
    assert received_bytes(mixture, low) == pytest.approx((4 + 4 * learning) * mixture.parameters * 63 / 64)


def test_exchanged_bytes_are_rows_of_each_expert_that_leave_the_rank() -> None:
    mixture = shape("30B-A3B")

    def exchanged(expert: int, *, recompute: bool = False) -> float:
        settings = TrainerConfig(ranks=64, dtype="bfloat16", parallel={"expert": expert}, recompute=recompute)
        return exchanged_bytes(mixture, settings, tokens=1000)

    assert exchanged(1) == 0
    assert exchanged(8) == pytest.approx(8 * 1000 * 48 * 8 * 2048 * 7 / 8)
    assert exchanged(8, recompute=True) == pytest.approx(1.5 * exchanged(8))
    assert (shape("744B-A40B").expert_layers, shape("744B-A40B").layers) == (75, 78), "dense layers exchange nothing"


def test_heads_and_experts_limit_what_is_proposed() -> None:
    odd = replace(shape("30B-A3B"), heads=14, expert_count=12)
    for layout in find_layouts(CONFIG, odd, 64, GPU_BYTES):
        assert layout.trainer.parallel.context <= 2
        assert layout.trainer.parallel.expert <= 4


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *words])
    return result.exit_code, result.output


def test_the_command_prints_settings_and_says_if_none_fits(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTURES["235B-A22B"]))
    words = (str(RECIPE), "--config", str(config), "--gpus")
    code, output = run(*words, "64x80", "--json")
    report = json.loads(output)
    assert (code, report["ok"]) == (0, True)
    first = report["layouts"][0]
    assert "trainer.ranks=64" in first["settings"]
    assert first["total_bytes"] <= first["limit_bytes"]
    assert sum(first["parts"].values()) == pytest.approx(first["total_bytes"], abs=10)
    code, output = run(*words, "64x80")
    assert (code, first["simulation"] in output) == (0, True)
    setup = str(Path(penstock.__file__).parent / "simulator" / "setups" / "agentic-64.yaml")
    simulated = CliRunner().invoke(app, ["simulate", setup, *first["simulation"].split(), "--json"])
    assert simulated.exit_code == 0, simulated.output
    code, output = run(*words, "8x24")
    assert (code, "none fits" in output) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((str(RECIPE), "--gpus", "64"), "such as 64x80"),
        (("--gpus", "64x80"), "goes with a RECIPE"),
        ((str(RECIPE), "model=unknown/model", "--gpus", "64x80"), "name its config.json with --config"),
        ((str(RECIPE), "trainer.parallel.tensor=2", "--gpus", "64x80"), "trainer.parallel.tensor 1"),
    ],
)
def test_the_command_names_what_it_cannot_lay_out(words: tuple[str, ...], message: str) -> None:
    code, output = run(*words)
    assert (code, message in " ".join(output.split())) == (2, True)


def test_a_recipe_keeps_its_own_context() -> None:
    config: RunConfig = load_config(RECIPE, [*WORDS, "trainer.parallel.context=2"])
    assert all(one.trainer.parallel.context >= 2 for one in find_layouts(config, shape("30B-A3B"), 8, GPU_BYTES))
