"""What a server does before its engine: bring files here, merge adapters, and leave nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.weight_sync.conftest import TOKEN, OpenRoute, small_tensors
from tests.weight_sync.http.http_parts import cutting_proxy

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from penstock.common import Backoff
from penstock.weight_sync import (
    Downloader,
    Fetcher,
    Manifest,
    MergingFetcher,
    WeightPublisher,
    WeightsRefused,
    WeightsUnreachable,
    no_fetch,
    read_verified,
)

pytestmark = pytest.mark.torch
LOW = {"base_model.model.a.lora_A.weight": torch.ones(2, 4), "base_model.model.a.lora_B.weight": torch.ones(3, 2)}


@pytest.fixture
def shared(tmp_path: Path) -> Manifest:
    """A version that engines reach where it is."""
    return WeightPublisher(tmp_path / "published", "shm").write(1, small_tensors().items())


async def test_fetch_leaves_files_of_this_machine_where_they_are(shared: Manifest, tmp_path: Path) -> None:
    fetcher = Fetcher(tmp_path / "s0", TOKEN)
    assert await no_fetch(shared) == await fetcher(shared) == shared
    await fetcher.close()
    assert Path(shared.place).is_file()


async def test_fetch_waits_for_a_file_that_is_not_there_yet(shared: Manifest, tmp_path: Path) -> None:
    """Unreachable, and not refused: a trainer that restarts writes it under the same announcement."""
    fetcher, file = Fetcher(tmp_path / "s0", TOKEN), Path(shared.place)
    kept = file.rename(tmp_path / "kept")
    with pytest.raises(WeightsUnreachable, match=f"{file} is not there yet"):
        await fetcher(shared)
    kept.rename(file)
    assert await fetcher(shared) == shared


async def test_fetch_brings_served_files_and_serves_them_until_close(open_route: OpenRoute, tmp_path: Path) -> None:
    manifest = (await open_route("http")).publish(1, small_tensors())
    folder = tmp_path / "s0"
    fetcher = Fetcher(folder, TOKEN)
    local = await fetcher(manifest)
    assert (local.transport, Path(local.place).parent) == ("shm", folder)
    assert await fetcher(manifest) == local
    assert torch.equal(read_verified(local)["last"], small_tensors()["last"])
    assert fetcher._peers is not None
    assert fetcher._peers._files is not None
    url = f"{fetcher._peers._files.url}/{Path(local.place).name}"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        assert len((await client.get(url)).content) == local.bytes
        (folder / "left-by-another-life").touch()
        await fetcher.close()
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    assert not folder.exists()


async def test_fetch_ends_with_its_server(
    open_route: OpenRoute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weight_sync.http.client.RECONNECT", Backoff(500.0))
    monkeypatch.setitem(Downloader.__init__.__kwdefaults__, "stall_s", 2000.0)
    route = await open_route("http")
    manifest = route.publish(1, small_tensors())
    async with cutting_proxy(route.server.url, 1000) as proxy, asyncio.timeout(200):
        own = replace(manifest.files[-1], place=f"{proxy.url}/{manifest.files[-1].name}")
        fetcher = Fetcher(tmp_path / "s0", TOKEN)
        fetching = asyncio.create_task(fetcher(replace(manifest, files=(own,))))
        while not proxy.ranges:
            await asyncio.sleep(0.01)
        await fetcher.close()
        with pytest.raises(WeightsUnreachable, match=r"this server stops|broken off here"):
            await fetching


async def test_fetch_into_a_folder_of_others_is_refused(open_route: OpenRoute, tmp_path: Path) -> None:
    manifest = (await open_route("http")).publish(1, small_tensors())
    folder = tmp_path / "s0"
    folder.mkdir()
    folder.chmod(0o777)
    fetcher = Fetcher(folder, TOKEN)
    with pytest.raises(WeightsUnreachable, match=str(folder)):
        await fetcher(manifest)
    assert fetcher._peers is None, "nothing of that folder is served"
    await fetcher.close()
    assert folder.is_dir()


class Fetched:
    """A `ClosableFetch` of files that are here."""

    closed = False

    async def __call__(self, manifest: Manifest, /) -> Manifest:
        return manifest

    async def close(self) -> None:
        self.closed = True


async def test_fetch_merges_adapters_with_the_threads_it_may_use(
    shared: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fetched, asked, threads = tmp_path / "model", Fetched(), list[Path](), list[int]()
    model.mkdir()
    save_file({"a.weight": torch.zeros(3, 4)}, model / "model.safetensors")
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def find_model() -> Path:
        asked.append(model)
        return model

    fetcher = MergingFetcher(fetched, tmp_path / "merged", find_model, "float32", 3)
    assert await fetcher(shared) == shared
    assert (asked, threads) == ([], []), "a full version needs no model"
    publisher = WeightPublisher(tmp_path / "adapters", "shm", model=model)
    for version in (1, 2):
        adapter = publisher.write_adapter(version, LOW.items(), {"r": 2, "lora_alpha": 2 * version})
        full = await fetcher(adapter)
        assert (full.version, full.adapter) == (version, None)
        assert torch.equal(read_verified(full)["a.weight"], torch.full((3, 4), 2.0 * version))
    assert (asked, threads) == ([model], [3])
    (tmp_path / "merged" / "left-by-another-life").touch()
    await fetcher.close()
    assert (fetched.closed, (tmp_path / "merged").exists()) == (True, False)
    with pytest.raises(WeightsUnreachable, match="stops"):
        await fetcher(adapter)


async def test_fetch_closes_where_nothing_was_merged(tmp_path: Path) -> None:
    model, fetched = tmp_path / "model", Fetched()
    model.mkdir()
    save_file({"a.weight": torch.zeros(3, 4)}, model / "model.safetensors")
    publisher = WeightPublisher(tmp_path / "adapters", "shm", model=model)
    adapter = publisher.write_adapter(1, LOW.items(), {"r": 2, "lora_alpha": 2})
    assert adapter.adapter is not None
    other = replace(adapter, adapter=replace(adapter.adapter, base="0" * 16))
    fetcher = MergingFetcher(fetched, tmp_path / "merged", lambda: model, "float32", 1)
    with pytest.raises(WeightsRefused, match="other weights of version 0"):
        await fetcher(other)
    await fetcher.close()
    assert (fetched.closed, (tmp_path / "merged").exists()) == (True, False)


async def test_fetch_without_adapters_closes_what_it_wraps(tmp_path: Path) -> None:
    fetched: Any = Fetched()
    await MergingFetcher(fetched, tmp_path / "merged", Path, "float32", 1).close()
    assert fetched.closed
