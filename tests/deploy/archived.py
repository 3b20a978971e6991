"""Trajectories for archives."""

from __future__ import annotations

import numpy as np

from penstock.transfer_queue import COMPLETED, Segment, Trajectory


def episode(name: str, reward: float, step: int) -> Trajectory:
    """An episode that the version `step` sampled, the second member of each group with an instance."""
    segment = Segment(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4, 5], np.int32),
        response_mask=np.array([1, 1, 0], np.uint8),
        response_logprobs=np.array([-0.5, -0.25, 0], np.float32),
        version_spans=np.array([[step, 0, 2]], np.int32),
        turn_starts=np.array([0], np.int32),
    )
    extra = {"instance_id": "hello-file"} if name.endswith("#1") else {}
    task = name.partition("#")[0]
    return Trajectory(name, task, [segment], reward, COMPLETED, num_turns=1, extra=extra, data_source="sums")
