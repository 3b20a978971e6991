"""Ranks that share out a pack's tokens give what one rank's plain forward gives, judged in float64: also of models
whose layers carry a state from token to token, or whose heads have sinks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from plain_steps import STEPS, assert_equal, launch, plain
from scripts.model_table.families import FAMILIES

pytestmark = pytest.mark.torch
MIXTURES = ("Qwen3Next", "GraniteMoeHybrid", "GptOss")
"""Their routes are replayed: float32 and float64 may choose otherwise between two experts."""
KINDS = ("GptOss", "Qwen3_5", "Qwen3Next", "NemotronH", "GraniteMoeHybrid", "Bamba", "FalconH1", "Lfm2")


def check(ranks: int, kinds: tuple[str, ...], folder: Path) -> None:
    models = {one.kind: one.save(folder / f"{one.kind} model") for one in FAMILIES if one.kind in kinds}
    config = {"parallel": {"context": ranks}}
    cases = {kind: {"model": model, "config": config, "steps": STEPS} for kind, model in models.items()}
    launch(folder, ranks, {kind: {**case, "replay": kind in MIXTURES} for kind, case in cases.items()})
    for kind, model in models.items():
        assert_equal(plain(model), folder / kind)


def test_states_cross_ranks(tmp_path: Path) -> None:
    check(2, ("Lfm2",), tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 4])
def test_states_and_sinks_of_every_family_cross_ranks(ranks: int, tmp_path: Path) -> None:
    check(ranks, KINDS, tmp_path)
