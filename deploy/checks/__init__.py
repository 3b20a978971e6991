"""What must hold before a run costs anything: `penstock doctor` prints it, `penstock run` refuses on a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.deploy.checks.check import Check
from penstock.deploy.checks.inputs import check_data, check_model, check_reward, check_template
from penstock.deploy.checks.machine import (
    check_engine,
    check_ports,
    check_redis,
    check_sandbox,
    check_shared_memory,
    check_trainer,
)
from penstock.deploy.checks.settings import (
    check_algorithm,
    check_capacity,
    check_correction,
    check_lengths,
    check_sampling,
    check_training_engine,
)
from penstock.deploy.config import RunConfig

__all__ = ["Check", "run_checks"]

CHECKS: tuple[Callable[[RunConfig], Check | None], ...] = (
    check_correction,
    check_algorithm,
    check_training_engine,
    check_lengths,
    check_sampling,
    check_capacity,
    check_ports,
    check_redis,
    check_engine,
    check_trainer,
    check_model,
    check_shared_memory,
    check_reward,
    check_sandbox,
    check_data,
    check_template,
)

OF_THIS_MACHINE = {check_ports, check_engine, check_trainer, check_shared_memory}
"""They say nothing about a run whose roles are elsewhere."""


def run_checks(config: RunConfig, *, here: bool = True) -> Iterator[Check]:
    """All checks, cheapest first, one at a time so that a person sees them come. `here`: roles run on this machine."""
    for check in CHECKS:
        if not here and check in OF_THIS_MACHINE:
            continue
        found = check(config)
        if found is not None:
            yield found
