"""What a trainer owns of its published weights: a folder, and under some transports a server of it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.broadcasting import broadcasting
from tests.weight_sync.conftest import TOKEN, next_version, small_tensors

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from penstock.weight_sync import (
    Transport,
    WeightFiles,
    WeightPublisher,
    WeightSource,
    read_verified,
    spread_shards,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("transport", ["http", "broadcast"])
async def test_weight_files_are_served_on_a_free_port_while_open(tmp_path: Path, transport: Transport) -> None:
    """Two runs on one machine; a run's files outlive its server."""
    runs = [WeightFiles(tmp_path / name, transport, token=TOKEN) for name in ("a", "b")]
    for files in runs:
        await files.open()
    manifests = [await asyncio.to_thread(files.write, 1, small_tensors().items()) for files in runs]
    ports = {urlsplit(manifest.place).port for manifest in manifests}
    assert len(ports) == 2
    assert all(port is not None and port > 1023 for port in ports)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        for manifest in manifests:
            assert len((await client.get(manifest.place)).content) == manifest.bytes
        for files in runs:
            await files.close()
            assert list(files.directory.iterdir()) != []
        for manifest in manifests:
            with pytest.raises(httpx.ConnectError):
                await client.get(manifest.place)


async def test_weight_files_name_an_address_that_is_taken(tmp_path: Path) -> None:
    first = WeightFiles(tmp_path / "a", "http", token=TOKEN)
    await first.open()
    port = urlsplit((await asyncio.to_thread(first.write, 1, small_tensors().items())).place).port
    assert port is not None
    second = WeightFiles(tmp_path / "b", "http", token=TOKEN, port=port)
    with pytest.raises(OSError, match=str(port)):
        await second.open()
    await first.close()


@pytest.mark.parametrize(("settings", "base"), [({}, None), ({"full_every": 4}, 1)], ids=["default", "delta"])
async def test_weight_files_are_full_unless_deltas_are_asked_for(
    tmp_path: Path, settings: dict[str, Any], base: int | None
) -> None:
    files = WeightFiles(tmp_path / "published", "shm", **settings)
    await files.open()
    tensors = small_tensors()
    assert Path(files.write(1, tensors.items()).place).name == "weights-00000001.safetensors"
    tensors = next_version(tensors, 2)
    manifest = files.write(2, tensors.items())
    assert manifest.base_version == base
    assert torch.equal(read_verified(manifest)["last"], tensors["last"])
    await files.close()


@pytest.mark.parametrize("transport", ["shm", "disk", "http"])
async def test_weight_files_are_written_from_the_copies_of_ranks(
    tmp_path: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name, and on the disk where that is what is asked for; a delta of that number is of another life."""
    synced: list[Path] = []
    monkeypatch.setattr("penstock.common.files.fsync_path", synced.append)
    files, tensors, source = await opened(tmp_path / "published", transport), small_tensors(), WeightSource()
    source.take(1, spread_shards(tensors.items(), torch.bfloat16, 0, 1))
    delta = files.directory / "weights-00000001.delta.safetensors"
    delta.write_bytes(b"of a life that was taken back")
    manifest = await asyncio.to_thread(files.write_from_ranks, 1, source)
    assert files.offers(manifest.as_dict())
    assert not delta.exists()
    assert bool(synced) == (transport == "disk")
    (file,) = files.directory.glob("*.safetensors")
    found = read_verified(replace(manifest, files=(replace(manifest.files[0], place=str(file)),)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.bfloat16() if tensor.is_floating_point() else tensor), name
    await files.close()


async def opened(folder: Path, transport: Transport = "http", **settings: Any) -> WeightFiles:
    files = WeightFiles(folder, transport, token=TOKEN, **settings)
    await files.open()
    return files


async def test_weight_files_of_broadcasts_are_full_when_written(tmp_path: Path) -> None:
    files = await opened(tmp_path / "a", "broadcast", full_every=4)
    tensors = small_tensors()
    await asyncio.to_thread(files.write, 1, tensors.items())
    manifest = await asyncio.to_thread(files.write, 2, next_version(tensors, 2).items())
    assert (manifest.base_version, manifest.deltas_follow) == (None, False)
    await files.close()


@pytest.mark.parametrize(("transport", "meets"), [("broadcast", True), ("http", False)])
async def test_weight_files_of_adapters_say_where_servers_meet(
    tmp_path: Path, transport: Transport, meets: bool
) -> None:
    save_file({"a.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    files = await opened(tmp_path / "published", transport, model=tmp_path)
    low = {"base_model.model.a.lora_A.weight": torch.ones(2, 4), "base_model.model.a.lora_B.weight": torch.ones(3, 2)}
    manifest = files.write_adapter(1, low.items(), {"r": 2, "lora_alpha": 2})
    address = manifest.place.rpartition("/")[0]
    assert manifest.broadcast == (f"{address}/broadcasts/adapter" if meets else "")
    await files.close()


async def test_weight_files_move_with_their_trainer(tmp_path: Path) -> None:
    before = await opened(tmp_path / "a")
    manifest = await asyncio.to_thread(before.write, 1, small_tensors().items())
    assert before.offers(manifest.as_dict())
    assert before.moved(manifest.as_dict()) is None, "they are where it says"
    after = await opened(tmp_path / "a", "broadcast")
    assert not after.offers(manifest.as_dict())
    moved = after.moved(manifest.as_dict())
    assert moved is not None
    assert (moved.transport, moved.state) == ("broadcast", manifest.state)
    assert urlsplit(moved.place).port != urlsplit(manifest.place).port
    assert urlsplit(moved.place).path == urlsplit(manifest.place).path
    assert moved.broadcast == f"{moved.place.rpartition('/')[0]}/broadcasts/"
    assert after.offers(moved.as_dict())
    back = before.moved(moved.as_dict())
    assert back == manifest, "and no meeting"
    local = WeightFiles(tmp_path / "a", "shm")
    assert (local.moved(manifest.as_dict()), local.offers(manifest.as_dict())) == (None, False)
    shared = await asyncio.to_thread(WeightPublisher(tmp_path / "a", "shm").write, 1, small_tensors().items())
    assert after.moved(shared.as_dict()) is None, "servers find it by its path"
    assert local.offers(shared.as_dict())
    (tmp_path / "a" / "weights-00000001.safetensors").unlink()
    assert (after.moved(manifest.as_dict()), after.offers(moved.as_dict())) == (None, False)
    assert (after.moved({"version": 3}), after.offers({"version": 3})) == (None, False), "of another release"
    for files in (before, after):
        await files.close()


async def test_broadcast_is_offered_as_a_file_until_the_next(tmp_path: Path) -> None:
    """The file of one that nobody asked for is written when somebody does."""
    async with broadcasting(tmp_path / "published", full_every=2) as trainer:
        first, second = [await trainer.publish(version, small_tensors(version), members=0) for version in (1, 2)]
        assert [trainer.files.offers(manifest.as_dict()) for manifest in (first, second)] == [True, True]
        third = await trainer.publish(3, small_tensors(3), members=0)
        offered = [trainer.files.offers(manifest.as_dict()) for manifest in (first, second, third)]
        assert offered == [True, False, True]
        assert [trainer.place_of_file(manifest).exists() for manifest in (first, second, third)] == offered
        fourth = await trainer.publish(4, small_tensors(4), members=0)
        assert trainer.files.offers(fourth.as_dict())
        assert not trainer.place_of_file(fourth).exists()


async def test_broadcasts_leave_the_files_of_the_newest_versions(tmp_path: Path) -> None:
    async with broadcasting(tmp_path / "published", full_every=1) as trainer:
        for version in (1, 2, 3):
            await trainer.publish(version, small_tensors(version), members=0)
        assert sorted(path.name[8:16] for path in trainer.files.directory.iterdir()) == ["00000002", "00000003"]


async def test_file_that_cannot_be_written_for_who_asked_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with broadcasting(tmp_path / "published", full_every=2) as trainer:
        await trainer.publish(1, small_tensors(1), members=0)
        manifest = await trainer.publish(2, small_tensors(2), members=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
        async with (
            httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client,
            asyncio.timeout(60),
        ):
            while (found := await client.get(manifest.place)).status_code == 503:
                await asyncio.sleep(0.01)
        assert found.status_code == 404
        assert "version 2 cannot be written for a server that asked" in caplog.text
        assert not trainer.files.offers(manifest.as_dict())
