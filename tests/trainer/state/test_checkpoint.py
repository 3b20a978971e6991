"""Checkpoints: the next step after a restore is bitwise the same; whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from tests.virtual_clock import VirtualClock
from torch.distributed.checkpoint import filesystem
from trainer_support import BATCHES, newest, save, train_one

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.state.checkpoint import CheckpointStore, RecentBatches, save_timeout_s
from penstock.trainer.state.hashed_files import HashingWriter
from penstock.trainer.state.restore import newest_whole
from penstock.transfer_queue import DataCursor

pytestmark = pytest.mark.torch
CONFIG = TrainerConfig(lr=1e-3)
WITH_CRITIC = TrainerConfig(lr=1e-3, advantage="gae", kl={"in_reward": 0.1, "target": 0.5})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", keep=2)
    made.open()
    return made


@pytest.mark.parametrize("config", [CONFIG, WITH_CRITIC], ids=["grpo", "critic"])
def test_the_step_after_a_restore_is_bitwise_the_same(
    config: TrainerConfig, store: CheckpointStore, tiny_model: str, ranks: Ranks
) -> None:
    engine = FSDPEngine(tiny_model, config, ranks)
    train_one(engine, ranks, 0)
    torch.manual_seed(5)
    save(engine, ranks, store, 1, cursor=DataCursor(2, 17))
    random = torch.rand(3)
    expected = train_one(engine, ranks, 1)
    info = newest(store)
    assert (info.step, info.data_cursor, info.ranks, info.batches) == (1, DataCursor(2, 17), 1, BATCHES)
    other = FSDPEngine(tiny_model, config, ranks)
    other.load(info.path, info.ranks)
    assert torch.equal(torch.rand(3), random)
    again = train_one(other, ranks, 1)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    assert other.kl_coefficient == engine.kl_coefficient


def test_moments_of_an_optimizer_without_kernels_go_on_with_them(
    store: CheckpointStore, tiny_model: str, ranks: Ranks
) -> None:
    """A checkpoint says how its process computed updates; who loads it computes as it does itself, to the same."""
    plain, fused = (FSDPEngine(tiny_model, WITH_CRITIC, ranks) for _ in range(2))
    assert fused.critic is not None
    assert plain.critic is not None
    for one in (plain.optimizer, plain.critic.optimizer):
        for kind in (one.defaults, *one.param_groups):
            kind["fused"] = None
    before = train_one(plain, ranks, 0)
    for name, tensor in train_one(fused, ranks, 0).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-5, rtol=0, msg=name)
    save(plain, ranks, store, 1)
    info = newest(store)
    fused.load(info.path, info.ranks)
    for one in (fused.optimizer, fused.critic.optimizer):
        assert [group["fused"] for group in one.param_groups] == [True]
        assert {float(state["step"]) for state in one.state.values()} == {1.0}
    expected = train_one(plain, ranks, 1)
    for name, tensor in train_one(fused, ranks, 1).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)
    assert fused.kl_coefficient == plain.kl_coefficient


def test_what_is_saved_is_the_state_at_the_call(store: CheckpointStore, tiny_model: str, ranks: Ranks) -> None:
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    before = train_one(engine, ranks, 0)
    writing = engine.begin_save(store.unfinished(1))
    train_one(engine, ranks, 1)
    writing.result(timeout=300)
    store.seal(1, DataCursor(), 1, {})
    other = FSDPEngine(tiny_model, CONFIG, ranks)
    other.load(store.unfinished(1).with_suffix(""), ranks.world)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.weights(torch.float32))


def test_the_newest_are_kept_private_and_leftovers_go(tmp_path: Path, tiny_model: str, ranks: Ranks) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.open()
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    for step in (1, 2, 3):
        save(engine, ranks, store, step)
    store.unfinished(4).mkdir()
    store.open()
    assert sorted(p.name for p in store.folder.iterdir()) == ["step_00000002", "step_00000003"]
    assert store.folder.stat().st_mode & 0o077 == 0
    marker = json.loads((store.folder / "step_00000003" / "complete").read_text())
    assert set(marker["files"]) == {".metadata", "__0_0.distcp"}


def test_a_seal_reads_no_file_that_a_rank_has_written(
    store: CheckpointStore, tiny_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums were taken while the files were written; they are those of the files."""
    engine = FSDPEngine(tiny_model, WITH_CRITIC, ranks)
    train_one(engine, ranks, 0)
    read: list[str] = []

    def taken(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return {"bytes": path.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(path.read_bytes())}

    with monkeypatch.context() as patch:
        patch.setattr("penstock.trainer.state.checkpoint.fingerprint", taken)
        path = save(engine, ranks, store, 1)
    assert read == [".metadata"]
    files = json.loads((path / "complete").read_text())["files"]
    assert {name: taken(path / name) for name in files} == files
    assert files["__0_0.distcp"]["bytes"] > engine.state_bytes


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_is_not_as_its_writer_left_it_is_not_sealed(
    damage: str, store: CheckpointStore, tiny_model: str, ranks: Ranks
) -> None:
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    engine.begin_save(store.unfinished(1)).result(timeout=300)
    file = store.unfinished(1) / "__0_0.distcp"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(OSError, match=r"__0_0\.distcp"):
        store.seal(1, DataCursor(), 1, {})
    assert newest_whole(store, ranks) is None


def test_a_save_has_time_for_its_bytes_and_for_its_version() -> None:
    assert save_timeout_s(900.0, 0) == 1800.0
    assert save_timeout_s(900.0, 48 * 10**9) == 1800.0 + 2400.0


@pytest.mark.parametrize("damage", ["marker", "no marker", "batches"])
def test_a_damaged_marker_is_seen(
    store: CheckpointStore, tiny_model: str, ranks: Ranks, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    save(engine, ranks, store, 1)
    marker = save(engine, ranks, store, 2) / "complete"
    actions = {
        "marker": lambda: marker.write_text("{"),
        "no marker": marker.unlink,
        "batches": lambda: marker.write_text(marker.read_text().replace("train/7#0", "train/8#0")),
    }
    actions[damage]()
    info = newest(store)
    assert info.step == 1
    assert "step_00000002 is damaged" in caplog.text
    assert (store.folder / "step_00000002.damaged").exists()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """A folder with the whole checkpoints of steps 1 and 2."""
    ranks = Ranks.open(timeout_s=30)
    try:
        store = CheckpointStore(tmp_path_factory.mktemp("whole") / "checkpoints", keep=2)
        store.open()
        engine = FSDPEngine(tiny_model, CONFIG, ranks)
        for step in (1, 2):
            save(engine, ranks, store, step, DataCursor(step, 5))
        return store.folder
    finally:
        ranks.close()


@settings(max_examples=150)
@given(draws=st.data())
def test_whatever_happens_to_one_file_the_state_is_right_or_the_one_before(
    two_checkpoints: Path, draws: st.DataObject
) -> None:
    """One bit, a piece, the end or the whole of any file, `complete` too: nothing wrong is ever taken for right."""
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder) / "checkpoints", keep=2)
        shutil.copytree(two_checkpoints, store.folder)
        whole = newest(store)
        files = sorted(path for path in whole.path.iterdir() if path.is_file())
        victim = draws.draw(st.sampled_from(files), label="file")
        data = bytearray(victim.read_bytes())
        place = draws.draw(st.integers(0, len(data) - 1), label="place")
        kind = draws.draw(st.sampled_from(["bit", "zeros", "cut", "longer", "empty", "gone"]), label="damage")
        damaged = {
            "bit": data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :],
            "zeros": data[:place] + bytes(len(data) - place),
            "cut": data[:place],
            "longer": data + data[:1],
            "empty": b"",
        }
        if kind == "gone":
            victim.unlink()
        else:
            victim.write_bytes(damaged[kind])
        info = newest(store)
        same_bytes = victim.exists() and victim.read_bytes() == data
        assert info == whole if same_bytes else info.step == 1 or info == whole
        if victim.name != "complete" and not same_bytes:
            assert (info.step, info.data_cursor) == (1, DataCursor(1, 5))


class PowerCut(BaseException):
    """The machine stopped here."""


@pytest.mark.parametrize("moment", range(10))
def test_a_power_cut_at_every_moment_of_a_seal_leaves_a_whole_checkpoint(
    two_checkpoints: Path, tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, fsync, rename and removal in turn is the last thing that happened; keep=1 deletes old ones."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, folder)
    store = CheckpointStore(folder, keep=1)
    shutil.copytree(folder / "step_00000002", store.unfinished(3))
    (store.unfinished(3) / "complete").unlink()
    happened = 0

    def cutting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **kwargs: Any) -> Any:
            nonlocal happened
            if happened == moment:
                raise PowerCut(name)
            happened += 1
            return work(*args, **kwargs)

        return done

    for owner, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (Path, "write_text")):
        monkeypatch.setattr(owner, name, cutting(name, getattr(owner, name)))
    with contextlib.suppress(PowerCut):
        store.seal(3, DataCursor(3, 5), 1, BATCHES)
    monkeypatch.undo()
    store.open()
    info = newest(store)
    assert info.data_cursor == DataCursor(info.step, 5)
    assert not list(folder.glob("*.tmp"))
    assert not list(folder.glob("*.damaged"))
    assert info.step == (3 if moment > 5 else 2), "the rename is what makes it a checkpoint"


def test_steps_are_remembered_until_long_after_their_commit() -> None:
    clock = VirtualClock()
    recent = RecentBatches(keep_s=60.0, clock=clock)
    for step in range(4):
        recent.add(step, [[f"{step}#0"]])
    assert recent.below(3) == {0: [["0#0"]], 1: [["1#0"]], 2: [["2#0"]]}
    recent.committed(3)
    clock.now = 59.9
    assert sorted(recent.below(4)) == [0, 1, 2, 3]
    clock.now = 60.0
    assert sorted(recent.below(4)) == [3]
    clock.now = 1000.0
    assert sorted(recent.below(4)) == [3]


def test_each_commit_has_its_own_time() -> None:
    clock = VirtualClock()
    recent = RecentBatches(keep_s=10.0, clock=clock)
    recent.update({4: [["4#0"]], 5: [["5#0"]]})
    recent.add(6, [["6#0"]])
    recent.committed(5)
    clock.now = 6.0
    recent.committed(6)
    clock.now = 11.0
    assert sorted(recent.below(7)) == [5, 6]
    clock.now = 16.0
    assert sorted(recent.below(7)) == [6]


def test_a_step_that_is_trained_again_counts_as_it_was_last() -> None:
    recent = RecentBatches()
    recent.update({1: [["old#0"]]})
    recent.add(1, [["new#0"]])
    assert recent.below(2) == {1: [["new#0"]]}


def test_save_on_a_machine_with_a_gpu_makes_no_overlapping_loader(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, tmp_path: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the writer thread made a CUDA stream on device 0")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dcp.save({"weight": torch.ones(8)}, storage_writer=HashingWriter(tmp_path / "saved", ranks.rank))

    monkeypatch.undo()
    loaded = {"weight": torch.zeros(8)}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert torch.equal(loaded["weight"], torch.ones(8))
