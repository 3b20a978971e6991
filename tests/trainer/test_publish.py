"""Publishing beside the steps: nobody waits for the write, and a disk without room is said."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import StagedServer
from trainer_support import make_job, task_name

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.trainer import Ranks, TrainJob
from penstock.trainer.publish import Publisher, PublishTimeout
from penstock.trainer.ranks.distributed import TorchThread
from penstock.transfer_queue import Announcement, Batch, ServerInfo, Task, TrainerFenced
from penstock.weight_sync import Manifest, NoSpace, Shard, WeightFiles, read_verified

pytestmark = pytest.mark.torch
TOKEN = "the-token-of-this-run"


class OneTensor:
    """An engine whose step changes its weights in place."""

    adapter_settings = None

    def __init__(self) -> None:
        self.value = torch.zeros(1000)

    def step(self) -> None:
        self.value += 1

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.value.to(dtype, copy=True)

    def local_shards(self, dtype: torch.dtype) -> list[Shard]:
        return [Shard("w", (1000,), dtype, (1000 * dtype.itemsize,), self.value)]


class Setting:
    def __init__(self, job: TrainJob, publisher: Publisher, engine: OneTensor) -> None:
        self.queue: Any = job.run.queue
        self.publisher, self.engine = publisher, engine

    async def step(self, version: int, *, settle: bool = True) -> None:
        await self.queue.lease_batch(version - 1)
        self.engine.step()
        await self.publisher.announce(version)
        if settle:
            await self.publisher.settle()

    @property
    def manifests(self) -> list[Manifest]:
        return [Manifest.parse(announced.manifest) for announced in self.queue.announced]


@pytest.fixture
async def open_setting(tmp_path: Path, ranks: Ranks) -> AsyncIterator[Callable[..., Any]]:
    in_torch = TorchThread(1)
    opened: list[Setting] = []

    async def open_one(**rollout: Any) -> Setting:
        job, engine = (
            make_job(tmp_path, "", token=TOKEN, rollout={"weight_transport": "shm", **rollout}),
            OneTensor(),
        )
        tasks = [Task(task_name(number), "train", [], "test", None) for number in range(8)]
        await job.run.queue.submit(tasks)
        setting = Setting(job, Publisher(job, engine, ranks, in_torch), engine)  # type: ignore[arg-type]
        opened.append(setting)
        await setting.publisher.start(0)
        return setting

    yield open_one
    for setting in opened:
        await setting.publisher.close()
    in_torch.close()


@pytest.mark.parametrize(("rollout_dtype", "warned"), [("bfloat16", True), ("float32", False)])
async def test_a_trainer_warns_at_its_start_of_another_type_in_the_engines(
    rollout_dtype: str, warned: bool, open_setting: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    await open_setting(dtype=rollout_dtype)
    said = "trainer.dtype is float32 (auto, on CPUs), rollout.dtype bfloat16"
    assert (said in caplog.text) == warned
    assert ("set rollout.dtype=float32, or trainer.dtype=bfloat16" in caplog.text) == warned


async def test_steps_go_on_while_a_version_is_written(
    open_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = await open_setting()
    may_write = threading.Event()
    write = WeightFiles.write
    monkeypatch.setattr(WeightFiles, "write", lambda *arguments: may_write.wait(30) and write(*arguments))
    await setting.step(1, settle=False)  # back before a byte is written
    setting.engine.step()  # the next step changes the weights
    assert setting.queue.announced == []
    following = asyncio.create_task(setting.publisher.announce(2))
    done, _ = await asyncio.wait({following}, timeout=0.2)
    assert not done, "one copy of the weights at a time: the next version waits for this one"
    await setting.queue.lease_batch(1)
    may_write.set()
    await following
    await setting.publisher.settle()
    assert [announced.version for announced in setting.queue.announced] == [1, 2]
    assert [read_verified(manifest)["w"][0] for manifest in setting.manifests] == [1, 2], "each of its own step"


async def test_a_version_that_another_has_published_is_fatal(
    open_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = await open_setting()

    async def refuse(_announcement: Announcement) -> bool:
        return False

    monkeypatch.setattr(setting.queue, "publish_version", refuse)
    await setting.step(1, settle=False)
    with pytest.raises(TrainerFenced, match="version 1"):
        await setting.publisher.settle()


async def test_a_replaced_trainer_writes_over_no_file(
    open_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared disk the file of that version is the other trainer's."""
    setting = await open_setting()
    await setting.step(1)
    (file,) = Path(setting.queue.announced[0].manifest["path"]).parent.glob("*.safetensors")
    theirs = file.with_name(file.name.replace("1", "2"))
    theirs.write_bytes(b"of the trainer in its place")

    await setting.queue.lease_batch(1)

    async def fenced() -> None:
        raise TrainerFenced("epoch 1: another trainer has claimed the run, epoch 2")

    monkeypatch.setattr(setting.queue, "check_training", fenced)
    await setting.publisher.announce(2)
    with pytest.raises(TrainerFenced):
        await setting.publisher.settle()
    assert theirs.read_bytes() == b"of the trainer in its place"


async def test_no_room_is_said_at_the_next_step_and_the_old_version_stays_announced(
    open_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = await open_setting()
    await setting.step(1)
    usage = namedtuple("usage", "total used free")(10, 10, 0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage)
        await setting.step(2, settle=False)
        with pytest.raises(NoSpace, match=r"0 MiB free.*rollout\.weight_transport"):
            await setting.publisher.settle()
    assert setting.queue.version == 1
    assert read_verified(setting.manifests[0])["w"][0] == 1


async def test_publish_write_that_hangs_is_ended(
    open_setting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = await open_setting()
    setting.publisher._write_timeout_s = 0.05
    may_write = threading.Event()
    monkeypatch.setattr(WeightFiles, "write", lambda *_: may_write.wait(30))
    await setting.step(1, settle=False)
    with pytest.raises(PublishTimeout, match=r"trainer\.publish_timeout_s"):
        await setting.publisher.settle()
    may_write.set()
    assert setting.queue.announced == []


async def test_broadcast_goes_to_servers_that_wait_and_the_file_to_others(
    open_setting: Callable[..., Any], tmp_path: Path
) -> None:
    setting = await open_setting(weight_transport="broadcast", weights_full_every=9)
    await setting.step(1)
    first = setting.manifests[0]
    ready, late = StagedServer(tmp_path / "ready"), StagedServer(tmp_path / "late")
    assert (await ready.receive(first))["w"][0] == 1
    running = asyncio.create_task(ready.member.run(ready, lambda: first.broadcast))
    while not setting.publisher._files.broadcaster.parked:
        await asyncio.sleep(0.01)
    for server in (ServerInfo("s0", "http://a", 1), ServerInfo("s1", "http://b", 1, accepting=False)):
        await setting.queue.heartbeat(server)
    await setting.step(2, settle=False)
    setting.engine.step()  # the next step changes the weights while they are on their way
    await setting.publisher.settle()
    assert not list(setting.publisher._files.directory.glob("weights-00000002*")), "the server that waits has a place"
    second = setting.manifests[1]
    assert (await ready.receive(second))["w"].tolist() == [2.0] * 1000
    assert (await late.receive(second))["w"].tolist() == [2.0] * 1000
    assert (ready.by_file, late.by_file) == (1, 1)
    await cancel_and_wait([running])


async def test_broadcast_that_could_not_be_made_again_is_renewed_with_the_weights(
    open_setting: Callable[..., Any],
) -> None:
    """A trainer that came back has no file of a version that was broadcast: it writes one before it goes on."""
    setting = await open_setting(weight_transport="broadcast", weights_full_every=9)
    for version in (1, 2):
        await setting.step(version)
    newest = setting.queue.announced[-1].manifest
    assert setting.publisher._files.offers(newest)
    setting.publisher._files._unwritten = None
    assert not setting.publisher._files.offers(newest)
    await setting.publisher.announce(2)
    await setting.publisher.settle()
    assert setting.queue.renewed == [2]
    assert setting.queue.announced[-1].manifest["tensors"] == newest["tensors"]


@pytest.mark.parametrize("differs", [False, True])
async def test_a_version_that_is_gone_is_written_again_only_with_its_own_weights(
    open_setting: Callable[..., Any], differs: bool
) -> None:
    setting = await open_setting()
    await setting.step(1)
    before = setting.queue.announced[0].manifest
    Path(before["path"]).unlink()
    if differs:
        setting.engine.step()
    await setting.publisher.announce(1)
    await setting.publisher.settle()
    assert setting.queue.renewed == ([] if differs else [1])
    current = await setting.queue.latest_version()
    if differs:
        assert await setting.queue.lease_batch(1) == Batch(1, [])
        assert (current.version, read_verified(setting.manifests[-1])["w"][0]) == (2, 2)
    else:
        assert (current.version, current.manifest["tensors"]) == (1, before["tensors"])


async def test_a_batch_that_is_fixed_is_trained_where_its_version_is_gone(open_setting: Callable[..., Any]) -> None:
    setting = await open_setting()
    await setting.step(1)
    batch = await setting.queue.lease_batch(1)
    Path(setting.queue.announced[0].manifest["path"]).unlink()
    setting.engine.step()
    await setting.publisher.announce(1)
    await setting.publisher.settle()
    assert batch.groups
    assert await setting.queue.lease_batch(1) == batch
