"""Checks a loop's outputs against what the engine was fed and returned, and builds the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from penstock.agent_loops.chat.images import files_of
from penstock.agent_loops.errors import BadOutput, InfraFailure, TokenMismatch
from penstock.agent_loops.llm import SeenContexts
from penstock.agent_loops.segment import AgentLoopOutput
from penstock.agent_loops.token_row import little_endian
from penstock.rollout_server import BadRequest, read_images
from penstock.transfer_queue import EpisodeImages, Lease, Trajectory


def as_outputs(returned: Any) -> list[AgentLoopOutput]:
    """Returns the loop's outputs as a list. Raises `BadOutput` for another type or an empty list."""
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrong = [one for one in outputs if not isinstance(one, AgentLoopOutput)]
    if not outputs or wrong:
        raise BadOutput("loop", f"run() returned {returned!r:.200}; return segment.output() or a list of them")
    return outputs


def check_output(output: AgentLoopOutput, seen: SeenContexts) -> None:
    """Invariant 1 on the finished segment: each turn's context was fed as it stands here, and its answer follows it.

    Holds by construction for `SegmentBuilder`; refuses outputs that were edited by hand.
    Raises `TokenMismatch`, and `BadOutput` where nothing was sampled.
    """
    lengths = {len(output.response_ids), len(output.response_mask), len(output.response_logprobs)}
    if len(lengths) != 1:
        raise TokenMismatch("loop", f"response ids, mask and logprobs have different lengths {sorted(lengths)}")
    if not output.num_turns:
        raise BadOutput("loop", "run() returned a segment in which nothing was sampled")
    bounds = turn_bounds(output)
    if sum(end - start for start, end in bounds) != int(output.response_mask.sum()):
        raise TokenMismatch("loop", "the mask marks ids as sampled that belong to no turn")
    ids = np.concatenate([output.prompt_ids, output.response_ids]).astype(np.int32)
    digest, position = xxhash.xxh3_64(), 0
    for start, end in bounds:
        for at, known, what in ((start, seen.before, "was fed"), (end, seen.after, "sampled")):
            stop = len(output.prompt_ids) + at
            digest.update(little_endian(ids[position:stop]))
            position = stop
            if (stop, digest.intdigest()) not in known:
                raise TokenMismatch("loop", f"the ids up to {stop} are not what the engine {what}")


def turn_bounds(output: AgentLoopOutput) -> list[tuple[int, int]]:
    """(start, end) of each turn's sampled ids, as response positions."""
    starts = [int(start) for start in output.turn_starts]
    limits = [*starts[1:], len(output.response_ids)]
    sampled = (output.response_mask != 0).tobytes()
    bounds = []
    for start, limit in zip(starts, limits, strict=True):
        fed = sampled.find(b"\0", start, limit)
        bounds.append((start, fed if fed >= 0 else limit))
    return bounds


def to_trajectory(
    lease: Lease,
    outputs: Sequence[AgentLoopOutput],
    reward: float | None,
    metrics: Mapping[str, float],
    extra: Mapping[str, Any],
    *,
    images: EpisodeImages | None = None,
) -> Trajectory:
    """Segments in order; the episode's outcome is its last segment's. `images`: as `images_of` finds them.

    The row's `extra_info.instance_id` is kept in `extra`: people know tasks of Harbor and SWE-bench by that name.

    Raises `BadOutput` naming what is not a number.
    """
    merged_metrics = {key: value for output in outputs for key, value in output.metrics.items()}
    instance = lease.task.extra_info.get("instance_id")
    merged_extra = {"instance_id": instance} if isinstance(instance, str) else {}
    merged_extra |= {key: value for output in outputs for key, value in output.extra.items()}
    return Trajectory(
        episode_id=lease.episode_id,
        task_id=lease.task.task_id,
        segments=tuple(outputs),
        reward=reward,
        outcome=outputs[-1].outcome,
        turn_rewards=_turn_rewards(outputs),
        num_turns=sum(output.num_turns for output in outputs),
        metrics={key: number_of(value, f"metrics[{key!r}]") for key, value in {**merged_metrics, **metrics}.items()},
        extra={**merged_extra, **extra},
        data_source=lease.task.data_source,
        images=images,
    )


def _turn_rewards(outputs: Sequence[AgentLoopOutput]) -> tuple[float, ...]:
    """Return rewards by turn; a segment without rewards has 0 for each of its turns if another has some."""
    if not any(len(output.turn_rewards) for output in outputs):
        return ()
    padded = (output.turn_rewards or (0.0,) * output.num_turns for output in outputs)
    return tuple(number_of(value, "turn_rewards") for values in padded for value in values)


def number_of(value: Any, where: str) -> float:
    """Returns `value` as a float. Raises `BadOutput` if it is not a number; the text "1.0" is none."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadOutput("loop", f"{where} is {value!r:.80}, not a number") from None


async def images_of(lease: Lease, outputs: Sequence[AgentLoopOutput]) -> EpisodeImages | None:
    """Returns the images that the trajectory carries for its segments; None if they have none.

    A file of a tool is read now: it is the tool's, and may be gone before the episode is trained on. Raises
    `InfraFailure("loop")` if it is gone already.
    """
    if not any(output.images for output in outputs):
        return None
    by_segment = tuple(tuple(image.sha256 for image in output.images) for output in outputs)
    refs = {image.sha256: image for output in outputs for image in output.images}
    of_task = files_of(lease.task.messages)
    urls = {name: ref.url for name, ref in refs.items() if ref.url in of_task}
    carried = [ref for name, ref in refs.items() if name not in urls]
    try:
        data = await asyncio.to_thread(read_images, carried)
    except BadRequest as error:
        problem = f"{error}: an image that a tool or loop gave must stay until its episode ends; or give a data: URL"
        raise InfraFailure("loop", problem) from error
    return EpisodeImages(by_segment, dict(zip((ref.sha256 for ref in carried), data, strict=True)), urls)
