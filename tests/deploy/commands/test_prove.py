"""`penstock prove` names one altered byte, one planted episode, one changed row; its signatures are ssh-keygen's."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.commands.test_archive_questions import episode
from typer.testing import CliRunner, Result

from penstock.deploy import app
from penstock.transfer_queue import Archive


def prove(*words: object, code: int = 0) -> Result:
    ended = CliRunner().invoke(app, ["prove", *map(str, words)])
    assert ended.exit_code == code, ended.output
    return ended


@pytest.fixture
def run(bare_run: Path) -> Path:
    """A run that trained rows 0 and 1 of three in two steps, with a record."""
    data = bare_run / "t.jsonl"
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "sums", "reward_model": {"ground_truth": "1"}}
    data.write_text("".join(json.dumps({**row, "extra_info": {"index": n}}) + "\n" for n in range(3)))
    with (bare_run / "config.yaml").open("a") as file:
        file.write("seed: 0\n")
    text = (bare_run / "config.yaml").read_text().replace("train: t.jsonl", "train: t.jsonl\n  shuffle: false")
    (bare_run / "config.yaml").write_text(text)
    model = bare_run / "final_model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (bare_run / "code" / "mine").mkdir(parents=True)
    (bare_run / "code" / "mine" / "reward.py").write_text("def compute_score(): ...\n")
    archive = Archive(bare_run / "archive", "mine", 1 << 30)
    groups = {}
    for step in range(2):
        names = [f"train/0000/{step:08d}#{member}" for member in range(2)]
        archive.append(step, [episode(name, float(n), [1, step], [3, 4]) for n, name in enumerate(names)])
        groups[step] = [names]
    archive.commit(2, groups)
    prove(bare_run, "--record")
    return bare_run


def test_what_is_as_it_was_is_as_recorded(run: Path) -> None:
    assert prove(run).stdout.endswith("as recorded; 2 steps, 4 episodes; not signed\n")
    assert "trained in steps 1" in prove(run, "--row", 1).stdout
    assert json.loads(prove(run, "--row", 2, "--json").stdout) == {"row": 2, "steps": []}
    assert "has 3 rows" in prove(run, "--row", 3, code=2).stderr


def alter_weights(run: Path) -> None:
    (run / "final_model" / "model.safetensors").write_bytes(b"Weights")


def add_file(run: Path) -> None:
    (run / "final_model" / "more.bin").touch()


def alter_code(run: Path) -> None:
    (run / "code" / "mine" / "reward.py").write_text("def compute_score(): return 1\n")


def alter_row(run: Path) -> None:
    data = run / "t.jsonl"
    data.write_text(data.read_text().replace('"index": 1', '"index": 7'))


def plant_episode(run: Path) -> None:
    archive = Archive(run / "archive", "mine", 1 << 30)
    archive.append(2, [episode("train/0000/00000002#0", 1.0, [1, 9], [3, 4])])
    archive.commit(3, {2: [["train/0000/00000002#0"]]})


def alter_batch(run: Path) -> None:
    path = min((run / "archive" / "batches").glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (alter_weights, "model: model.safetensors has other bytes than in the record"),
        (add_file, "model: more.bin is not in the record"),
        (alter_code, "code: mine/reward.py has other bytes"),
        (alter_row, "step 1: its episodes are not those of the record"),
        (plant_episode, "step 2: its episodes are not those of the record"),
        (alter_batch, "its bytes are not those of its name"),
    ],
)
def test_what_was_changed_is_named(run: Path, change: Callable[[Path], None], said: str) -> None:
    change(run)
    assert said in prove(run, code=1).stdout


def test_steps_that_the_archive_has_pruned_are_no_fault(run: Path) -> None:
    archive = Archive(run / "archive")
    (first,) = (file for file in archive.files() if file.step == 0)
    archive.prune(sum(file.path.stat().st_size for file in archive.files()) - first.path.stat().st_size)
    assert "the archive has no step below 1 any more: 1 steps were not compared" in prove(run).stdout


def test_a_model_that_was_moved_is_compared_with_its_run_by_name(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run / "final_model", tmp_path / "moved")
    assert "the run is not here" in prove(moved).stdout
    assert "as recorded" in prove(moved, "--run", run).stdout
    (moved / "provenance.json").unlink()
    assert "no record" in prove(moved, code=2).stderr


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is missing: apt-get install openssh-client")
def test_signatures_of_ssh_keygen(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("sshsig")
    record = run / "final_model" / "provenance.json"
    for name in ("team", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    team = tmp_path / "team.pub"
    assert "is missing, and --signers asks" in prove(run, "--signers", team, code=1).stdout
    subprocess.run(["ssh-keygen", "-Y", "sign", "-n", "penstock", "-f", tmp_path / "team", record], check=True)
    assert "signed by SHA256:" in prove(run, "--signers", team).stdout
    other = prove(run, "--signers", tmp_path / "other.pub", code=1).stdout
    assert "is not in" in other
    assert other.endswith("not signed\n")
    (tmp_path / "words.pub").write_text("# of the team\nno key\n")
    assert "a line is no public key" in prove(run, "--signers", tmp_path / "words.pub", code=2).stderr
    record.write_text(record.read_text().replace('"run": "mine"', '"run": "Mine"'))
    assert "is not a signature of this record" in prove(run, "--signers", team, code=1).stdout
    (record.parent / "provenance.json.sig").unlink()
    subprocess.run(["ssh-keygen", "-Y", "sign", "-n", "file", "-f", tmp_path / "team", record], check=True)
    assert "is not a signature of this record" in prove(run, "--signers", team, code=1).stdout
