"""The batch scripts: sound shell, no secret in them, each role where it belongs, and what they do when told to stop."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE
from tests.deploy.placements.slurm.desk import Desk

from penstock.deploy import ConfigError, RunConfig, RunDir, load_config
from penstock.deploy.placements.slurm.script import SlurmJob, join_script

GPUS = SlurmJob("gpu", "team", "12:00:00", gpus_per_node=4, sbatch=("qos=high",), setup=("module load cuda",))
HTTP = "rollout.weight_transport=http"
VARIANTS = {
    "cpu": {},
    "one node": {"nodes": 1},
    "gpus": {"nodes": 3, "job": GPUS, "words": ["trainer.ranks=8", "rollout.evaluation_server=true"]},
    "sandbox": {"sandbox": True, "words": ["sandbox.max_boxes=3"]},
    "own redis": {"words": ["transfer_queue.url=redis://there:6379"]},
    "pyxis": {"job": SlurmJob(container="registry.example/team/penstock:1", mounts=(Path("/scratch"),))},
    "apptainer": {"job": SlurmJob(gpus_per_node=2, container="/images/penstock.sif", runtime="apptainer")},
    "interface": {"nodes": 2, "job": SlurmJob(gpus_per_node=2, interface="ib0")},
    "nothing but the trainer": {"words": ["rollout.servers=0", "agent.workers=0"]},
}


@pytest.fixture(params=VARIANTS)
def variant(request, script_of) -> str:
    settings = dict(VARIANTS[request.param])
    return script_of(*settings.pop("words", []), **settings)


def test_the_script_is_sound_shell(variant: str, tmp_path: Path) -> None:
    _check_shell(variant, tmp_path / "run.sbatch")


RECIPE_CONFIG = load_config(RECIPE)


def join(run: Path, config: RunConfig, job: SlurmJob, servers: int, workers: int, gpus: int) -> str:
    counts = {"servers": servers, "workers": workers, "gpus_per_server": gpus}
    return join_script(RunDir(run), config, job, array="0-3", wait_s=60, **counts)


def test_the_join_is_sound_shell(tmp_path: Path) -> None:
    for servers, workers, gpus in ((1, 0, 0), (0, 2, 0), (2, 1, 2)):
        job = SlurmJob(gpus_per_node=2 * gpus, interface="ib0" if gpus else None)
        text = join(tmp_path, load_config(RECIPE, [HTTP]), job, servers, workers, gpus)
        _check_shell(text, tmp_path / "join.sbatch")


def _check_shell(text: str, path: Path) -> None:
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}")
    assert shellcheck, "pip install 'penstock[dev]' brings shellcheck"
    found = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    without_paths = re.sub(r"/[^\s'\",:=]+", "/path", text)  # how long those are is up to whoever made the clone
    assert max(map(len, without_paths.splitlines())) < 400


def test_what_was_asked_of_slurm_is_in_the_head(script_of, tmp_path: Path) -> None:
    lines = script_of(job=GPUS, nodes=3).splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        *("job-name=penstock-sums", "nodes=3", "partition=gpu", "account=team", "time=12:00:00", "gpus-per-node=4"),
        *("qos=high", "exclusive", "ntasks-per-node=1", "requeue", "open-mode=append", "signal=B:TERM@60"),
        *("dependency=singleton", f"output={tmp_path}/runs/sums/logs/slurm.log"),
    }
    assert "module load cuda" in lines


def test_script_each_role_is_a_step_with_own_secrets_and_log(script_of, tmp_path: Path) -> None:
    names = {"queue", "head", "rollout-0", "rollout-1", "rollout-2", "agent-0", "agent-1"}
    _, asked = Desk(tmp_path / "desk", "n1 n2 n3").play(script_of("rollout.servers=3", nodes=3), names)
    where = {name: words.partition("--nodelist=")[2].split()[0] for name, words in asked.items()}
    first = {"queue": "n1", "head": "n1"}
    assert where == {**first, "rollout-0": "n2", "rollout-1": "n3", "rollout-2": "n2", "agent-0": "n2", "agent-1": "n3"}
    run = tmp_path / "runs" / "sums"
    for name, words in asked.items():
        role = {"queue": "owner", "head": "owner"}.get(name, name.partition("-")[0])
        assert f"{run}/slurm/{role}.env" in words
        assert f"--output={run}/logs/{name}.log" in words
        assert "--nodes=1 --ntasks=1" in words
        assert "--overlap" in words
    port = 10000 + 77 % 5000 * 4
    assert f"redis-server {run}/redis --host 127.0.0.1 --port {port}" in asked["queue"]
    assert f"run {RECIPE} --resume" in asked["head"]
    servers_elsewhere = ("rollout.servers=0", "agent.workers=0", "rollout.host=0.0.0.0", "rollout.weights_host=0.0.0.0")
    for told in (*servers_elsewhere, HTTP, f"transfer_queue.url=redis://127.0.0.1:{port}"):
        assert told in asked["head"].split()
    assert "rollout --name rollout-2 --wait-s 600" in asked["rollout-2"]
    for name in ("head", "rollout-0", "rollout-1"):
        assert "env PENSTOCK_HOST=127.0.0.1" in asked[name], "as Slurm reaches the node"


def test_nodes_are_reached_by_the_address_of_the_named_interface(
    script_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PENSTOCK_HOST` is also what gloo and NCCL find their interface by (`interfaces_for`)."""
    monkeypatch.setenv("NODE_ADDRESS", "192.0.2.9")  # the management network's
    text = script_of("agent.workers=0", "trainer.ranks=2", nodes=3, trainer_nodes=2, job=SlurmJob(interface="lo"))
    names = {"address", "queue", "head", "trainer-1", "rollout-0"}
    _, asked = Desk(tmp_path / "desk", "n1 n2 n3").play(text, names)
    for name in ("head", "trainer-1", "rollout-0"):
        assert "PENSTOCK_HOST=127.0.0.1" in asked[name].split(), name
    assert not any("192.0.2.9" in words for words in asked.values())
    without = Desk(tmp_path / "other", "n1 n2")
    output, _ = without.start(script_of(job=SlurmJob(interface="none0"))).communicate(timeout=60)
    assert "node n1 has no IPv4 address on none0" in output
    assert set(without.asked()) == {"address"}
    with pytest.raises(ConfigError, match="--interface"):
        SlurmJob(interface="ib0; rm")


def test_gpus_go_to_the_trainer_and_the_servers_alone(script_of, tmp_path: Path) -> None:
    text = script_of("trainer.ranks=8", "rollout.servers=2", "agent.workers=1", nodes=3, job=GPUS)
    names = {"queue", "head", "trainer-1", "rollout-0", "rollout-1", "agent-0"}
    _, asked = Desk(tmp_path / "desk", "n1 n2 n3").play(text, names)
    for name in ("head", "trainer-1"):
        assert "--exact --mem=0 --gpus-per-node=4 --cpus-per-task=16" in asked[name]
    assert "--exact --mem=0 --gpus-per-node=1 --cpus-per-task=4" in asked["rollout-1"]
    for name in ("queue", "agent-0"):
        assert "--overlap --cpu-bind=none --gres=none" in asked[name]
    rendezvous = f"127.0.0.1:{10000 + 77 * 4 + 1}"
    assert f"train --wait-s 600 --nnodes 2 --node-rank 1 --rdzv-endpoint {rendezvous}" in asked["trainer-1"]
    assert f"env PENSTOCK_TRAIN_NODES=2 PENSTOCK_TRAIN_RENDEZVOUS={rendezvous}" in asked["head"]
    assert all("--nodelist=n3" in asked[name] for name in ("rollout-0", "rollout-1"))


def test_a_role_that_dies_is_started_again_and_a_killed_head_too(script_of, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "desk")
    desk.kill_next("rollout-0", 3)
    desk.kill_next("head", 137)
    job = desk.start(script_of("agent.workers=0"))
    desk.wait_for(lambda: [len(desk.asked().get(name, ())) for name in ("head", "rollout-0", "queue")] == [2, 2, 1])
    desk.end_head(0)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    assert "rollout-0 ended with status 3 (1 of 5 times in a row)" in output
    assert "head ended with status 137 (try 1 of 3)" in output


def test_a_head_that_failed_by_itself_is_final(script_of, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "desk")
    desk.kill_next("head", 1)
    job = desk.start(script_of())
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert len(desk.asked()["head"]) == 1
    assert desk.orders() == ["scancel --signal=TERM 77"]


@pytest.mark.parametrize(
    ("state", "restarts", "requeued"),
    [("RUNNING", "0", True), ("RUNNING", "5", False), ("CANCELLED", "0", False), ("COMPLETING", "0", False)],
)
def test_script_saves_and_requeues_before_the_time_limit(
    script_of, tmp_path: Path, state: str, restarts: str, requeued: bool
) -> None:
    """Cancelled and requeued by others, Slurm has told every process already: nothing may bring the job back."""
    desk = Desk(tmp_path / "desk")
    job = desk.start(script_of("agent.workers=0"), SLURM_RESTART_COUNT=restarts)
    desk.wait_for(lambda: set(desk.asked()) == {"queue", "head", "rollout-0"})
    desk.says(state)
    job.send_signal(signal.SIGTERM)
    if state == "RUNNING":
        desk.wait_for(lambda: desk.orders()[:1] == ["scancel --ctld --signal=TERM 77.3"])
    else:
        desk.end_head(130)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert ("scontrol requeue 77" in desk.orders()) == requeued, output
    told = desk.orders()
    assert told[-1 - requeued] == "scancel --signal=TERM 77"
    assert "in a row" not in output, "nothing is started again while the job stops"


def test_a_port_that_is_taken_is_passed_over(script_of, tmp_path: Path) -> None:
    base = 10000 + 77 * 4
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", base + 1))
        taken.listen()
        text = script_of("rollout.servers=0", "agent.workers=0")
        _, asked = Desk(tmp_path / "desk").play(text, {"head", "queue"})
    assert f"--port {base + 4}" in asked["queue"]


def test_containers_hold_every_role_and_see_its_folders(script_of, tmp_path: Path) -> None:
    image = "registry.example/team/penstock:1"
    text = script_of(job=SlurmJob(container=image, mounts=(Path("/scratch"),)))
    step = next(line for line in text.splitlines() if line.startswith("step="))
    for word in (f"--container-image={image}", "/scratch:/scratch", f"{tmp_path}/runs:{tmp_path}/runs"):
        assert word in step
    assert "penstock=(penstock)" in text
    text = script_of(job=SlurmJob(gpus_per_node=2, container="/images/penstock.sif", runtime="apptainer"))
    assert "penstock=(apptainer exec --nv --bind" in text
    assert "--container-image" not in text


def test_a_password_in_the_queues_address_is_refused(script_of) -> None:
    with pytest.raises(ConfigError, match="set PENSTOCK_REDIS_PASSWORD"):
        script_of("transfer_queue.url=redis://me:secret@there:6379")
    assert "--job-name=queue" not in script_of("transfer_queue.url=redis://there:6379")


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without dashes"):
        SlurmJob(sbatch=("--qos=high",))
    with pytest.raises(ConfigError, match="--mount"):
        SlurmJob(mounts=(Path("relative"),))
    with pytest.raises(ConfigError, match=HTTP):  # weights would not reach who joins
        join(tmp_path, RECIPE_CONFIG, SlurmJob(), 1, 0, 0)
