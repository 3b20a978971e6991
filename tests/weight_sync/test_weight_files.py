"""What a trainer owns of its published weights: a folder, and under some transports a server of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.weight_sync.conftest import TOKEN, next_version, small_tensors

torch = pytest.importorskip("torch")

from penstock.weight_sync import Transport, WeightFiles, read_verified

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
    files.write(1, tensors.items())
    tensors = next_version(tensors, 2)
    manifest = files.write(2, tensors.items())
    assert manifest.base_version == base
    assert torch.equal(read_verified(manifest)["last"], tensors["last"])
    await files.close()
