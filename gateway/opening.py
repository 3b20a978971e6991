"""The next episode for an agent, or why there is none."""

from __future__ import annotations

from penstock.agent_loops import EpisodeJournal
from penstock.gateway.errors import NotNow
from penstock.gateway.parts import CaptureParts
from penstock.transfer_queue import Lease, LeaseLost, QueueError, Status


async def next_lease(parts: CaptureParts) -> Lease | None:
    """A lease with nothing in its journal that counts: an earlier owner's agent is not this one. Raises `NotNow`."""
    try:
        version = await parts.client.best_version()
        leases = [] if version is None else await parts.queue.lease_episodes(parts.worker, 1, version)
        if leases and leases[0].journal:
            await EpisodeJournal(parts.queue, leases[0]).restart("leased to another agent")
            return await parts.queue.adopt(leases[0].episode_id, leases[0].fence)
    except LeaseLost:
        return None
    except QueueError as error:
        raise NotNow(f"the queue: {error}") from error
    return leases[0] if leases else None


async def why_none(parts: CaptureParts) -> str:
    """For people."""
    try:
        if await parts.client.best_version() is None:
            return "no rollout server takes requests now"
        return _cause(await parts.queue.status())
    except QueueError as error:
        return f"the queue: {error}"


def _cause(status: Status) -> str:
    """Why `lease_episodes` gave nothing."""
    groups, episodes = status.groups, status.episodes
    if not groups.get("queued") and not episodes.get("queued"):
        return f"no episode is queued; {episodes.get('leased', 0)} are being run"
    return (
        f"none of {groups.get('queued', 0)} queued groups is admitted now: version {status.version}, "
        f"step {status.step}, {groups.get('admitted', 0)} groups running, {groups.get('ready', 0)} ready; "
        "they wait for the trainer"
    )
