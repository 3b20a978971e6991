"""The simulator's gate is the queue's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.conftest import cluster

from penstock.simulator.episodes import may_admit
from penstock.transfer_queue import may_admit as queue_may_admit


@given(st.integers(0, 3), st.integers(1, 4), st.lists(st.sampled_from(["admit", "ship", "publish"]), max_size=80))
def test_admission_is_the_queues(staleness: int, per_step: int, acts: list[str]) -> None:
    """Through any course of a run: both admit, or neither. Batches ship oldest first, versions follow steps."""
    config = cluster(max_staleness=staleness, groups_per_step=per_step)
    dues: list[int] = []
    admitted = shipped = version = 0
    for act in acts:
        theirs = queue_may_admit(version + staleness, dues, shipped, per_step)
        assert may_admit(config, admitted, version) == theirs
        if act == "admit" and theirs:
            dues.append(version + staleness)
            admitted += 1
        elif act == "ship" and len(dues) >= per_step and shipped == version:
            dues, shipped = dues[per_step:], shipped + 1
        elif act == "publish" and version < shipped:
            version += 1
