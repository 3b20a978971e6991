"""`penstock archive`: lists, shows, exports, verifies and prunes what a run trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.archived import episode
from typer.testing import CliRunner, Result

from penstock.common import FileLock
from penstock.deploy import app
from penstock.transfer_queue import Archive


@pytest.fixture
def folder(bare_run: Path) -> Path:
    """A run that has committed three steps of two episodes."""
    archive = Archive(bare_run / "archive", "mine", 1 << 30)
    groups = {step: [[f"train/{step}#0", f"train/{step}#1"]] for step in range(3)}
    for step, (names,) in groups.items():
        archive.append(step, [episode(name, float(number), step) for number, name in enumerate(names)])
    archive.commit(3, groups)
    return bare_run


def ask(command: str, folder: Path, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["archive", command, str(folder), *words])
    assert result.exit_code == code, result.output
    return result


def test_ls_sums_up_by_any_column_and_takes_conditions(folder: Path) -> None:
    steps = json.loads(ask("ls", folder, "--json").stdout)
    assert [(one["step"], one["episodes"], one["reward_mean"], one["tokens"]) for one in steps] == [
        (step, 2, 0.5, 4) for step in range(3)
    ]
    words = ("--by", "episode", "--where", "reward<0.5", "--where", "step>=1", "--where", "data_source=sums")
    heading, *lines = (line.split() for line in ask("ls", folder, *words).stdout.splitlines())
    assert heading == ["episode", "episodes", "task", "reward", "tokens", "oldest_version", "learned"]
    assert [line[0] for line in lines] == ["train/1#0", "train/2#0"]
    assert [line[heading.index("task")] for line in lines] == ["train/1", "train/2"]


@pytest.mark.parametrize(("where", "number"), [("=", 2), (">=", 3), (">", 1), ("<=", 4), ("<", 2)])
def test_rewards_that_differ_by_rounding_are_one_value(folder: Path, where: str, number: int) -> None:
    rewards = [0.0, 0.999, 0.7 + 0.2 + 0.1, 1.0, 2.0]
    archive = Archive(folder / "archive")
    archive.append(3, [episode(f"train/3#{place}", reward, 3) for place, reward in enumerate(rewards)])
    words = ("--json", "--where", "step=3", "--where", f"reward{where}1")
    assert json.loads(ask("ls", folder, *words).stdout)[0]["episodes"] == number


def test_a_step_after_the_index_is_named_as_not_learned(folder: Path, tmp_path: Path) -> None:
    Archive(folder / "archive").append(3, [episode("train/3#0", 1.0, 3)])
    steps = json.loads(ask("ls", folder, "--json").stdout)
    assert [(one["step"], one["learned"]) for one in steps] == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert (
        "train/3#0  step 3  reward 1.0  completed  in no checkpoint: not learned"
        in ask("show", folder, "train/3#0").stdout
    )
    assert len(ask("ls", folder, "--where", "learned=0").stdout.splitlines()) == 2
    assert "6 episodes of 3 steps" in ask("export", folder, str(tmp_path / "out")).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--where", "rewards<1"), "no column; did you mean 'reward'?"),
        (("--where", "reward"), "write COLUMN=VALUE"),
        (("--where", "step=x"), "step is a number"),
        (("--by", "colour"), "no column of the index"),
    ],
)
def test_what_the_index_does_not_have_is_refused_by_name(folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in " ".join(ask("ls", folder, *words, code=2).stderr.split())


def test_show_reads_an_episode_as_the_trainer_saw_it(folder: Path) -> None:
    text = ask("show", folder, "train/1#1").stdout
    assert "train/1#1  hello-file  step 1  reward 1.0  completed" in text
    assert "── sampled by version 1, 2 tokens\n[3, 4]" in text
    assert json.loads(ask("show", folder, "train/1#1", "--json").stdout)["segments"][0]["prompt_ids"] == [1, 2]
    assert "train/9#0: not in the archive" in ask("show", folder, "train/9#0", code=2).stderr


def test_exported_episodes_are_recorded_trajectories(folder: Path, tmp_path: Path) -> None:
    refused = ask("export", folder, str(tmp_path / "best"), "--where", "reward>=2", code=2)
    assert "no checkpoint has an episode with reward>=2" in refused.stderr
    assert not (tmp_path / "best").exists()
    ask("export", folder, str(tmp_path / "best"), "--where", "reward>=1")
    files = sorted((tmp_path / "best" / "trajectories").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.jsonl" for step in range(3)]
    again = ask("export", folder, str(tmp_path / "best"), code=2)
    assert "is there already" in again.stderr
    (record,) = map(json.loads, files[2].read_text().splitlines())
    assert (record["episode_id"], record["segments"][0]["runs"][0]["ids"]) == ("train/2#1", [3, 4])


def test_verify_names_faults_and_prune_deletes_the_oldest(folder: Path) -> None:
    assert "0 faults in 3 steps" in ask("verify", folder).stdout
    lock = FileLock(folder / "trainer.lock", "")
    assert lock.try_acquire()
    assert "its trainer is running" in ask("prune", folder, "--max-bytes", "0", code=2).stderr
    lock.release()
    first, *_ = sorted((folder / "archive" / "batches").iterdir())
    size = sum(path.stat().st_size for path in (folder / "archive" / "batches").iterdir())
    assert "1 steps deleted, 2 left" in ask("prune", folder, "--max-bytes", str(size - 1)).stdout
    assert not first.exists()
    second, *_ = sorted((folder / "archive" / "batches").iterdir())
    second.write_bytes(second.read_bytes()[:-1])
    assert "not those of its name" in ask("verify", folder, code=1).stdout


READER = """
import os, sys
from pathlib import Path
from penstock.deploy import app
from penstock.transfer_queue import Archive

Archive(Path(sys.argv[1]) / "nothing").index()  # pyarrow is loaded: its allocator may have threads
before = len(os.listdir("/proc/self/task"))
archive = Archive(Path(sys.argv[1]) / "archive")
archive.read(1, ["train/1#0"])
archive.batches(0, 3)
app(["archive", "ls", sys.argv[1], "--where", "reward<2"], standalone_mode=False)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_reader_leaves_no_thread_behind(folder: Path) -> None:
    """A pool of Arrow's that still works while the interpreter ends aborts the process now and then, after a sound
    end: https://github.com/apache/arrow/issues/34314."""
    command = [sys.executable, "-c", READER, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["0"]), done.stderr
