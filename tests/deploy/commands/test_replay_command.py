"""`penstock replay`, `bisect` and `rescore`: what cannot be done is refused before a folder is made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.deploy.archived import episode
from typer.testing import CliRunner

from penstock.deploy import ConfigError, app
from penstock.deploy.commands.replay import episodes_named
from penstock.deploy.commands.rescore import _store
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import Archive

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "--from", "3", "--to", "4"), "--from 3: no checkpoint is after that step"),
        (("replay", "--from", "0", "--to", "4"), "step 0 is not in the archive"),
        (("replay", "--from", "0"), "its archive has no committed step"),
        (("replay", "--from", "0", "--set", "rollout.engine=hf"), "only trainer.* can be changed"),
        (("bisect", "--below", "0.5"), "no step has the metric reward"),
        (("bisect", "--below", "0.5", "--metric", "entropy"), "--metric entropy"),
        (("rescore", "--to", "4", "--reward", "gsm8k"), "step 0 is not in the archive"),
        (("rescore", "--reward", "gsm8k", "--set", "agent.loop=single_turn"), "only trainer.* and agent.rewards.*"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(bare_run: Path, words: tuple[str, ...], message: str) -> None:
    command, *options = words
    result = CliRunner().invoke(app, [command, str(bare_run), *options])
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.output
    assert [path.name for path in bare_run.iterdir()] == ["config.yaml"]


def test_without_names_steps_and_episodes_of_the_stretch(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive", "mine", 1 << 30)
    groups = {step: [[f"train/{step}#0", f"train/{step}#1"]] for step in range(3)}
    for step, (names,) in groups.items():
        archive.append(step, [episode(name, 1.0, step) for name in names])
    archive.commit(3, groups)
    assert episodes_named(archive, 0, 3, []) == frozenset()
    assert episodes_named(archive, 0, 3, ["1", "train/2#1"]) == {"train/1#0", "train/1#1", "train/2#1"}
    for stranger in ("3", "train/1#2", "train/2#0"):
        with pytest.raises(ConfigError, match=f"--without {stranger}: no step from 0 to 1"):
            episodes_named(archive, 0, 2, [stranger])


async def test_rescored_batches_stay_on_a_disk_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a run's archive would delete the batches that training needs next."""
    archive = Archive(tmp_path / "archive", "mine", 1 << 30)
    groups = {step: [[f"train/{step}#0"]] for step in range(3)}
    for step, ((name,),) in groups.items():
        archive.append(step, [episode(name, 1.0, step)])
    archive.commit(3, groups)
    job = SimpleNamespace(run_dir=tmp_path / "rescored")
    replay: Any = SimpleNamespace(archive=archive, first=0, last=3, job=job)
    config: Any = SimpleNamespace(data=None, seed=0, agent=SimpleNamespace(concurrency=1))

    async def scored(trajectories: Any, *_: Any) -> Any:
        return trajectories

    monkeypatch.setattr("penstock.agent_loops.rescored", scored)
    monkeypatch.setattr("penstock.trainer.tasks_again", lambda *_: {})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    await _store(replay, config, None, None)  # type: ignore[arg-type]
    assert Archive(RunDir(job.run_dir).archive).batches(0, 3) == groups
