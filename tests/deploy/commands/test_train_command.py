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


def options_of(words: list[str]) -> dict[str, str]:
    """Of torchrun: what stands between ``python -m torch.distributed.run`` and the three words of a rank."""
    return dict(zip(words[3:-3:2], words[4:-3:2], strict=True))


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
        options = options_of(words)
        assert (options["--nproc-per-node"], options["--rdzv-id"], options["--local-addr"]) == (
            "2",
            "mine",
            "127.0.0.1",
        )
        assert options["--rdzv-conf"] == "store_type=file"
        assert options["--rdzv-endpoint"].endswith("/nodes")
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
    options = options_of(words)
    assert (options["--nnodes"], options["--node-rank"], options["--nproc-per-node"]) == ("2", "1", "2")
    assert (options["--rdzv-backend"], options["--rdzv-endpoint"], options["--rdzv-id"]) == (
        "static",
        "n1:4000",
        "mine",
    )
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["NCCL_SOCKET_IFNAME"] == (chosen or "lo"), "what the user has set stays"
    assert "PENSTOCK_RANKS_FILE" not in environment, "a file of this machine is no place to meet others"


def test_a_lone_rank_is_started_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`penstock train` would load the command line, ask the queue, and load everything again by exec."""

    def trainer(*overrides: str) -> RoleSpec:
        return roles_of(load_config(RECIPE, list(overrides)), LINK)[-1].spec(tmp_path)

    alone = trainer("trainer.threads=3")
    assert (alone.name, list(alone.argv[-2:])) == ("trainer", ["train-rank", "--alone"])
    assert alone.env["OMP_NUM_THREADS"] == "3"
    assert alone.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True", "packs are of many lengths"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert "PYTORCH_ALLOC_CONF" not in trainer().env, "what the user has set stays"
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


def test_the_head_passes_it_on_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "4")
    monkeypatch.setenv("PENSTOCK_TRAIN_RENDEZVOUS", "n1:4000")
    assert Rendezvous.of(None, 0, None) == Rendezvous(4, 0, "n1:4000")
    assert Rendezvous.of(2, 1, "n2:5000") == Rendezvous(2, 1, "n2:5000"), "explicit values win"


@pytest.mark.parametrize(
    ("nodes", "node_rank", "endpoint", "message"),
    [
        (2, 0, None, "2 machines need HOST:PORT"),
        (2, 0, "n1", "2 machines need HOST:PORT"),
        (2, 2, "n1:4000", "must be less than --nnodes 2"),
        (None, 0, None, "PENSTOCK_TRAIN_NODES='two'"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused(
    nodes: int | None, node_rank: int, endpoint: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TRAIN_NODES", "two")
    with pytest.raises(ConfigError, match=message):
        Rendezvous.of(nodes, node_rank, endpoint)


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        ({"ranks": 3}, 2, r"trainer\.ranks=3 is not divisible by 2"),
        (
            {"ranks": 12, "parallel": {"replicate": 2}},
            3,
            r"parallel\.replicate is 2: each 6 consecutive .* Set it to 3",
        ),
        ({"engine": "megatron", "ranks": 4, "parallel": {"tensor": 4}}, 2, r"tensor is 4, and 2 of 4 ranks"),
        ({"engine": "megatron", "ranks": 4, "parallel": {"tensor": 2, "pipeline": 2}}, 2, ""),
        ({"ranks": 12, "parallel": {"expert": 4}}, 2, r"parallel\.expert is 4: .* 6 of 12 ranks .* Set it to 2"),
        *(({"ranks": 12, "parallel": {"expert": e}}, n, "") for e, n in ((6, 2), (3, 2), (12, 3))),
        *(({"ranks": 12, "parallel": {"replicate": r}}, n, "") for r, n in ((2, 2), (4, 2), (2, 4), (3, 3))),
    ],
)
def test_ranks_must_be_shared_out_evenly(settings: dict[str, Any], nodes: int, message: str) -> None:
    if not message:
        check_nodes(TrainerConfig(**settings), nodes)
        return
    with pytest.raises(BadJob, match=message):
        check_nodes(TrainerConfig(**settings), nodes)
