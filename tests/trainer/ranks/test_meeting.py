from __future__ import annotations

import pytest
import torch.distributed as dist

from penstock.trainer import RANKS_FILE_VARIABLE
from penstock.trainer.ranks.distributed import rendezvous_store


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", RANKS_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_rank_is_alone():
    assert isinstance(rendezvous_store(), dist.HashStore)


def test_on_one_machine_ranks_meet_in_the_file_they_are_told(tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), (RANKS_FILE_VARIABLE, str(tmp_path / "ranks"))):
        monkeypatch.setenv(name, value)
    mine, other = rendezvous_store(), dist.FileStore(str(tmp_path / "ranks"), 2)
    assert isinstance(mine, dist.FileStore)
    mine.set("from", "rank 1")
    assert other.get("from") == b"rank 1"


def test_over_several_machines_torchrun_says_where(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert rendezvous_store() is None
