"""Checkpoints: the next step after a restore is bitwise the same; whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trainer_support import make_trajectory  # noqa: E402

from penstock.trainer.batch import make_step_batch  # noqa: E402
from penstock.trainer.checkpoint import CheckpointStore, begin_save, load  # noqa: E402
from penstock.trainer.config import TrainerConfig  # noqa: E402
from penstock.trainer.engine import FSDPEngine  # noqa: E402
from penstock.trainer.learner import Learner  # noqa: E402
from penstock.trainer.ranks import Ranks  # noqa: E402
from penstock.transfer_queue.ledger import Batch  # noqa: E402
from penstock.transfer_queue.trajectory import DataCursor  # noqa: E402

pytestmark = pytest.mark.torch
CONFIG = TrainerConfig(lr=1e-3)
WITH_CRITIC = TrainerConfig(lr=1e-3, advantage="gae", kl={"in_reward": 0.1, "target": 0.5})
BATCHES = {0: [["train/3#0", "train/3#1"], ["train/7#0"]], 12: [["train/9#1"]]}


def train_one(engine: FSDPEngine, ranks: Ranks, step: int) -> dict[str, torch.Tensor]:
    trajectories = [make_trajectory(f"train/{step}", m, step) for m in range(4)]
    batch = make_step_batch(Batch(step, [[t.episode_id for t in trajectories]]), [0], trajectories, 0, engine.limits)
    learner = Learner(engine.config, engine, ranks)
    scored = learner.score(batch)
    learner.update(batch, scored, learner.advantages(batch, scored))
    return dict(engine.weights(torch.float32))


def save(
    engine: FSDPEngine, ranks: Ranks, store: CheckpointStore, step: int, cursor: DataCursor = DataCursor()
) -> Path:
    begin_save(engine, ranks, store.unfinished(step)).result(timeout=30)
    return store.seal(step, cursor, ranks.world, BATCHES).path


@pytest.mark.parametrize("config", [CONFIG, WITH_CRITIC], ids=["grpo", "critic"])
def test_the_step_after_a_restore_is_bitwise_the_same(
    config: TrainerConfig, tmp_path: Path, tiny_model: str, ranks: Ranks
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.open()
    engine = FSDPEngine(tiny_model, config, ranks)
    train_one(engine, ranks, 0)
    torch.manual_seed(5)
    save(engine, ranks, store, 1, cursor=DataCursor(2, 17))
    random = torch.rand(3)
    expected = train_one(engine, ranks, 1)
    found = store.newest()
    assert found is not None
    assert (found.step, found.data_cursor, found.ranks, found.batches) == (1, DataCursor(2, 17), 1, BATCHES)
    other = FSDPEngine(tiny_model, config, ranks)
    load(other, ranks, found)
    assert torch.equal(torch.rand(3), random)
    again = train_one(other, ranks, 1)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    assert other.kl_coefficient == engine.kl_coefficient


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, tiny_model: str, ranks: Ranks) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.open()
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    before = train_one(engine, ranks, 0)
    writing = begin_save(engine, ranks, store.unfinished(1))
    train_one(engine, ranks, 1)
    writing.result(timeout=30)
    store.seal(1, DataCursor(), 1, {})
    other = FSDPEngine(tiny_model, CONFIG, ranks)
    load(other, ranks, store.newest())
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


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "marker", "no marker", "batches"])
def test_every_damage_is_seen(
    tmp_path: Path, tiny_model: str, ranks: Ranks, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.open()
    engine = FSDPEngine(tiny_model, CONFIG, ranks)
    save(engine, ranks, store, 1)
    newest = save(engine, ranks, store, 2)
    shard, marker = newest / "__0_0.distcp", newest / "complete"
    data = shard.read_bytes()
    actions = {
        "flip": lambda: shard.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:]),
        "truncate": lambda: shard.write_bytes(data[:-1]),
        "remove": shard.unlink,
        "marker": lambda: marker.write_text("{"),
        "no marker": marker.unlink,
        "batches": lambda: marker.write_text(marker.read_text().replace("train/7#0", "train/8#0")),
    }
    actions[damage]()
    found = store.newest()
    assert found is not None
    assert found.step == 1
    assert "step_00000002 is damaged" in caplog.text
    assert (tmp_path / "step_00000002.damaged").exists()
