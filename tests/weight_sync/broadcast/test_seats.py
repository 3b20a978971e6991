"""Seats of a broadcast: which wire a group gets, and what is said of a slower one."""

from __future__ import annotations

import asyncio

import pytest
from tests.until import until

from penstock.weight_sync import Broadcaster


async def test_two_versions_of_nccl_go_over_gloo_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broadcaster = Broadcaster(wires=("nccl/2.29.7", "gloo/2"))
    for _ in range(2):
        assert await broadcaster.park(1, "nccl/2.30.7,gloo/2", wait_s=0.01) is None
    (warning,) = caplog.messages
    for part in ("gloo", "NCCL 2.29.7", "NCCL 2.30.7", "scripts/install-torch"):
        assert part in warning


@pytest.mark.parametrize("offered", ["nccl/2.29.7,gloo/2", "gloo/2"])
async def test_same_nccl_or_a_server_without_a_gpu_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture, offered: str
) -> None:
    broadcaster = Broadcaster(wires=("nccl/2.29.7", "gloo/2"))
    assert await broadcaster.park(1, offered, wait_s=0.01) is None
    assert caplog.messages == []


async def test_group_has_the_wire_of_most_servers_and_the_others_leave_at_once() -> None:
    broadcaster = Broadcaster(wires=("nccl/2.29.7", "gloo/2"))
    waiting = [
        asyncio.create_task(broadcaster.park(1, wire, wait_s=600)) for wire in ("nccl/2.29.7", "gloo/2", "gloo/2")
    ]
    await until(lambda: broadcaster.parked == 3)
    sending = broadcaster.open(1, [])
    assert sending.listener is not None
    sending.listener.close()
    async with asyncio.timeout(60):
        offers = await asyncio.gather(*waiting)
    assert [offer and (offer.wire, offer.first_rank, offer.size) for offer in offers] == [
        None,
        ("gloo/2", 1, 3),
        ("gloo/2", 2, 3),
    ]
