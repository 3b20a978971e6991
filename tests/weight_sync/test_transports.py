"""Every transport, full and delta: the same promises."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.weight_sync.conftest import OpenRoute, Route, altered, next_version, other_checksum, small_tensors

torch = pytest.importorskip("torch")

from penstock.weight_sync import (
    WeightsRefused,
    WeightsUnreachable,
)

pytestmark = pytest.mark.torch
WAYS = [(transport, full_every) for transport in ("shm", "disk", "http", "broadcast") for full_every in (1, 4)]


@pytest.fixture(params=WAYS, ids=[f"{transport}-{'delta' if n > 1 else 'full'}" for transport, n in WAYS])
async def route(request: pytest.FixtureRequest, open_route: OpenRoute) -> Route:
    opened: Route = await open_route(*request.param)
    return opened


def history(count: int) -> list[dict[str, Any]]:
    versions = [small_tensors()]
    while len(versions) < count:
        versions.append(next_version(versions[-1], len(versions)))
    return versions


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


async def test_every_version_arrives_bit_for_bit(route: Route) -> None:
    for version, tensors in enumerate(history(9), 1):
        manifest = await route.announce(version, tensors)
        assert manifest.transport == route.transport
        assert same(await route.holds(manifest), tensors)


async def test_versions_may_be_skipped_and_servers_may_join_late(route: Route) -> None:
    versions = history(8)
    manifests = []
    for version, tensors in enumerate(versions, 1):
        manifests.append(await route.announce(version, tensors))
        if version in (2, 3, 7):
            assert same(await route.holds(manifests[-1], "sometimes"), tensors)
    for name in ("sometimes", "late"):
        assert same(await route.holds(manifests[-1], name), versions[-1])


async def test_several_servers_at_once(route: Route) -> None:
    # The file server needs some of the loop's threads: six servers may not have them all.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(20))
    for version, tensors in enumerate(history(3), 1):
        manifest = await route.announce(version, tensors)
        servers = [route.holds(manifest, f"s{number}") for number in range(6)]
        assert all(same(received, tensors) for received in await asyncio.gather(*servers))


@pytest.mark.parametrize("first_there", [True, False], ids=["running", "joining"])
async def test_an_altered_byte_is_refused_by_name_and_a_later_full_version_is_taken(
    route: Route, first_there: bool
) -> None:
    versions = history(5)
    first = await route.announce(1, versions[0])
    if first_there:
        await route.holds(first)
        await route.leave("s0")
    manifest = await route.announce(2, versions[1])
    file = route.file(manifest)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    whole = manifest.base_version is None
    there = [name for name in manifest.entries if whole or not torch.equal(versions[0][name], versions[1][name])]
    with pytest.raises(WeightsRefused, match=f"'{there[-1]}'"):
        await route.holds(manifest)
    for version in (3, 4, 5):  # the fifth is full everywhere
        manifest = await route.announce(version, versions[version - 1])
    assert manifest.base_version is None
    assert same(await route.holds(manifest), versions[4])


async def test_a_truncated_file_is_refused_and_a_vanished_one_is_said(route: Route) -> None:
    manifest = await route.announce(1, small_tensors())
    file = route.file(manifest)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(WeightsRefused, match=rf"{file.name}.*the manifest (says|promises)"):
        await route.holds(manifest)
    file.unlink()
    with pytest.raises((WeightsRefused, WeightsUnreachable), match=rf"{file.name}.*(No such file|not any more)"):
        await route.holds(manifest)
    file.write_bytes(whole)
    assert same(await route.holds(manifest), small_tensors())


async def test_an_announcement_that_differs_from_the_file_is_refused_by_name(route: Route) -> None:
    manifest = altered(await route.announce(1, small_tensors()), other_checksum)
    with pytest.raises(WeightsRefused, match=f"'{manifest.tensors[0].name}' has checksum"):
        await route.holds(manifest)
