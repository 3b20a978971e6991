"""What must hold before a run costs anything.

`penstock run` refuses on a failure of those in `FACTS`: cheap, and certain to end the run. `penstock doctor` asks those
in `TRIALS` too: they take seconds, write, connect, open boxes, run the user's code, or estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from penstock.agent_loops import allow_imports_from
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.containment import check_containment
from penstock.deploy.preflight.data import check_data, check_prompts
from penstock.deploy.preflight.disk import check_disk, check_room
from penstock.deploy.preflight.gpus import check_gpus
from penstock.deploy.preflight.limits import check_open_files, check_threads
from penstock.deploy.preflight.loop import check_loop
from penstock.deploy.preflight.memory import check_memory
from penstock.deploy.preflight.model import check_context, check_model, check_vocabulary
from penstock.deploy.preflight.packages import check_engine, check_trainer, check_versions
from penstock.deploy.preflight.ports import check_advertised, check_ports
from penstock.deploy.preflight.redis import check_own_redis, check_redis
from penstock.deploy.preflight.reward import check_reward, check_score
from penstock.deploy.preflight.sandbox import check_sandbox
from penstock.deploy.preflight.services import check_search
from penstock.deploy.preflight.settings import (
    check_algorithm,
    check_capacity,
    check_correction,
    check_lengths,
    check_sampling,
    check_training_engine,
    check_training_job,
)
from penstock.deploy.preflight.shared_memory import check_shared_memory
from penstock.deploy.preflight.template import check_template

__all__ = ["Check", "all_checks", "joining_checks", "run_checks"]

Asked = Callable[[RunConfig], Check | Iterable[Check] | None]

FACTS: tuple[Asked, ...] = (
    check_correction,
    check_algorithm,
    check_training_engine,
    check_training_job,
    check_lengths,
    check_sampling,
    check_capacity,
    check_ports,
    check_redis,
    check_engine,
    check_trainer,
    check_model,
    check_vocabulary,
    check_context,
    check_shared_memory,
    check_room,
    check_reward,
    check_sandbox,
    check_data,
    check_template,
)
TRIALS: tuple[Asked, ...] = (
    check_versions,
    check_open_files,
    check_threads,
    check_advertised,
    check_memory,
    check_gpus,
    check_disk,
    check_own_redis,
    check_loop,
    check_prompts,
    check_score,
    check_search,
    check_containment,
)
JOINING: tuple[Asked, ...] = (
    check_versions,
    check_open_files,
    check_gpus,
    check_model,
    check_vocabulary,
    check_template,
    check_loop,
    check_sandbox,
    check_search,
)
"""What a machine needs that joins a living run with servers or workers."""
OF_THIS_MACHINE: frozenset[Asked] = frozenset(
    (check_ports, check_engine, check_trainer, check_shared_memory, check_room)
)
"""They say nothing about a run whose roles are elsewhere."""


def run_checks(config: RunConfig, *, here: bool = True) -> Iterator[Check]:
    """Those that refuse a run, cheapest first, one at a time so that a person sees them come.

    `here`: the roles run on this machine.
    """
    return _ask([check for check in FACTS if here or check not in OF_THIS_MACHINE], config)


def all_checks(config: RunConfig) -> Iterator[Check]:
    return _ask([*FACTS, *TRIALS], config)


def joining_checks(config: RunConfig) -> Iterator[Check]:
    return _ask(JOINING, config)


def _ask(checks: Iterable[Asked], config: RunConfig) -> Iterator[Check]:
    allow_imports_from(Path.cwd())  # as workers do: a recipe's tools and rewards may lie there
    for check in checks:
        found = check(config)
        if isinstance(found, Check):
            yield found
        elif found is not None:
            yield from found
