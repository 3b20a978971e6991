"""`penstock replay` and `penstock rescore`: what cannot be done is refused before a folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.deploy import app

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "--from", "3", "--to", "4"), "--from 3: no checkpoint is after that step"),
        (("replay", "--from", "0", "--to", "4"), "step 0 is not in the archive"),
        (("replay", "--from", "0"), "its archive has no committed step"),
        (("replay", "--from", "0", "--set", "rollout.engine=hf"), "only trainer.* can be changed"),
        (("rescore", "--to", "4", "--reward", "gsm8k"), "step 0 is not in the archive"),
        (("rescore", "--reward", "gsm8k", "--set", "agent.loop=single_turn"), "only trainer.* and agent.rewards.*"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(bare_run: Path, words: tuple[str, ...], message: str) -> None:
    command, *options = words
    result = CliRunner().invoke(app, [command, str(bare_run), *options])
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.output
    assert [path.name for path in bare_run.iterdir()] == ["config.yaml"]
