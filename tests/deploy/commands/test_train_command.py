"""Where the ranks of a trainer meet, on one machine and over several."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE
from typer.testing import CliRunner

from penstock.deploy import ConfigError, Rendezvous, RoleSpec, RunConnection, app, load_config, remove_weights, roles_of
from penstock.deploy.commands import train
from penstock.deploy.commands.train import exec_trainer
from penstock.trainer import BadJob, TrainerConfig
from penstock.trainer.engines import check_nodes

HERE = Path("/dev/shm/here")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_TRAIN_NODES", "PENSTOCK_TRAIN_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)


LINK = RunConnection("redis://127.0.0.1:1", "mine", None, "a token")


def become(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, runs: Path, *overrides: str
) -> tuple[list[str], dict[str, str]]:
    """Command and environment that `penstock train` becomes."""
    config = load_config(RECIPE, [f"runs_dir={runs}", "trainer.threads=3", *overrides])

    async def of_the_run(*_: Any) -> Any:
        return config

    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(train, "_config", of_the_run)
    monkeypatch.setattr(os, "execve", lambda _, words, environment: became.append((words, environment)))
    try:
        exec_trainer(LINK, rendezvous)
    finally:
        remove_weights(config)
    [found] = became
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_several_ranks_are_started_by_torchrun(
    ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")  # of somebody else's torchrun: a rank that has them waits for two more
    words, environment = become(Rendezvous(), monkeypatch, tmp_path, f"trainer.ranks={ranks}")
    rank = ["-m", "penstock.deploy.cli", "train-rank"]
    assert (words[0], words[-3:]) == (sys.executable, rank)
    assert environment["PENSTOCK_RUN"] == "mine"
    assert environment["OMP_NUM_THREADS"] == "3"
    if ranks == 1:
        assert words[1:] == rank
        assert not environment.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PENSTOCK_RANKS_FILE"}
    else:
        assert words[1:3] == ["-m", "torch.distributed.run"]
        assert words[words.index("--nproc-per-node") + 1] == "2"
        assert environment["PENSTOCK_RANKS_FILE"].endswith("/ranks")
        assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "30", "more than the trainer's grace"


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_ranks_of_several_machines_meet_at_a_port_and_take_one_interface(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of this machine's address as the others know it; gloo would look up the machine's name instead."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    monkeypatch.setattr(train, "own_host", lambda: "127.0.0.1")
    words, environment = become(Rendezvous(2, 1, "n1:4000"), monkeypatch, tmp_path, "trainer.ranks=4")
    told = dict(zip(words[3:-3:2], words[4:-3:2], strict=True))
    assert (told["--nnodes"], told["--node-rank"], told["--nproc-per-node"]) == ("2", "1", "2")
    assert (told["--rdzv-backend"], told["--rdzv-endpoint"]) == ("static", "n1:4000")
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["NCCL_SOCKET_IFNAME"] == (chosen or "lo"), "what the user has set stays"
    assert "PENSTOCK_RANKS_FILE" not in environment, "a file of this machine is no place to meet others"


def test_ranks_that_machines_cannot_share_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks=3 is not divisible by 2"):
        become(Rendezvous(2, 0, "n1:4000"), monkeypatch, tmp_path, "trainer.ranks=3")


def test_a_lone_rank_is_started_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`penstock train` would load the command line, ask the queue, and load everything again by exec."""

    def trainer(*overrides: str) -> RoleSpec:
        return roles_of(load_config(RECIPE, list(overrides)), LINK)[-1].spec(tmp_path)

    alone = trainer("trainer.threads=3")
    assert (alone.name, list(alone.argv[-2:])) == ("trainer", ["train-rank", "--alone"])
    assert alone.env["OMP_NUM_THREADS"] == "3"
    for asked in (trainer("trainer.ranks=2"), trainer("trainer.engine=megatron")):
        assert asked.argv[-1] == "train", "who finds out how many ranks there are, and in which environment"
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "2")
    assert trainer().argv[-1] == "train"


def test_a_lone_rank_leaves_the_torchrun_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr("penstock.deploy.run.roles.run_role", lambda main: None)
    assert CliRunner().invoke(app, ["train-rank"]).exit_code == 0
    assert os.environ["RANK"] == "3", "of our own torchrun"
    assert CliRunner().invoke(app, ["train-rank", "--alone"]).exit_code == 0
    assert not os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


def test_one_machine_meets_in_a_file() -> None:
    words = Rendezvous.of(None, 0, None).arguments(2, "mine", HERE)
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert (told["--nproc-per-node"], told["--rdzv-id"], told["--local-addr"]) == ("2", "mine", "127.0.0.1")
    assert (told["--rdzv-conf"], told["--rdzv-endpoint"]) == ("store_type=file", "/dev/shm/here/nodes")


def test_several_machines_share_the_ranks_out_evenly() -> None:
    words = Rendezvous.of(2, 1, "n1:4000").arguments(8, "mine", HERE)
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert (told["--nnodes"], told["--node-rank"], told["--nproc-per-node"]) == ("2", "1", "4")
    assert (told["--rdzv-backend"], told["--rdzv-endpoint"], told["--rdzv-id"]) == ("static", "n1:4000", "mine")


def test_the_head_passes_it_on_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "4")
    monkeypatch.setenv("PENSTOCK_TRAIN_RENDEZVOUS", "n1:4000")
    assert Rendezvous.of(None, 0, None) == Rendezvous(4, 0, "n1:4000")
    assert Rendezvous.of(2, 1, "n2:5000") == Rendezvous(2, 1, "n2:5000"), "explicit values win"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, 0, None), "2 machines need HOST:PORT"),
        ((2, 0, "n1"), "2 machines need HOST:PORT"),
        ((2, 2, "n1:4000"), "must be less than --nnodes 2"),
    ],
)
def test_what_cannot_meet_is_refused(given, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous.of(*given)


def test_ranks_that_cannot_be_shared_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadJob, match=r"trainer\.ranks=3 is not divisible by 2"):
        check_nodes(TrainerConfig(ranks=3), 2)
    with pytest.raises(BadJob, match=r"trainer\.parallel\.tensor is 4, and 2 of 4 ranks"):
        check_nodes(TrainerConfig(engine="megatron", ranks=4, parallel={"tensor": 4}), 2)
    check_nodes(TrainerConfig(engine="megatron", ranks=4, parallel={"tensor": 2, "pipeline": 2}), 2)
    with pytest.raises(BadJob, match=r"trainer\.parallel\.replicate is 2: each 6 consecutive .* Set it to 3"):
        check_nodes(TrainerConfig(ranks=12, parallel={"replicate": 2}), 3)
    for replicate, nodes in ((2, 2), (4, 2), (2, 4), (3, 3)):
        check_nodes(TrainerConfig(ranks=12, parallel={"replicate": replicate}), nodes)
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "two")
    with pytest.raises(ConfigError, match="PENSTOCK_TRAIN_NODES='two'"):
        Rendezvous.of(None, 0, None)
