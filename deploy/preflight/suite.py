"""Which checks are run when.

`penstock run` refuses a run on a failure in `FACTS`: cheap, and certain to end the run. `penstock doctor` also runs
`TRIALS`: they take seconds, write, connect, start boxes, run the user's code, or estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.agent_loops import allow_imports_from
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.agent import (
    check_lengths,
    check_loop,
    check_prompts,
    check_reward,
    check_score,
    check_search,
    check_template,
)
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.data import check_curriculum, check_data, check_sources
from penstock.deploy.preflight.disk import check_disk, check_room
from penstock.deploy.preflight.machine import (
    check_devices,
    check_driver,
    check_gpus,
    check_open_files,
    check_size,
    check_threads,
    check_wire,
)
from penstock.deploy.preflight.memory_checks import check_memory, check_shared_memory
from penstock.deploy.preflight.model import check_context, check_model, check_model_here, check_vocabulary
from penstock.deploy.preflight.network import (
    check_advertised,
    check_own_redis,
    check_ports,
    check_redis,
    check_weights_host,
)
from penstock.deploy.preflight.program import check_program
from penstock.deploy.preflight.routing import check_routing_replay
from penstock.deploy.preflight.sandbox import check_containment, check_harbor_tasks, check_sandbox
from penstock.deploy.preflight.service import check_keys, check_service, check_service_memory
from penstock.deploy.preflight.settings import (
    check_algorithm,
    check_capacity,
    check_concurrency,
    check_correction,
    check_dtype,
    check_engine,
    check_packing,
    check_sampling,
    check_sinks,
    check_trainable,
    check_trainer,
    check_training_engine,
    check_training_job,
    check_versions,
)
from penstock.deploy.preflight.stop_grace import check_stop_grace
from penstock.deploy.preflight.teachers import check_teachers
from penstock.deploy.preflight.turns import check_turns
from penstock.deploy.recipe_tree import ConfigError

Found = Check | Iterable[Check] | None
Asked = Callable[[RunConfig], Found]

PARTS: tuple[Asked, ...] = (
    check_ports,
    check_weights_host,
    check_redis,
    check_devices,
    check_engine,
    check_trainer,
    check_model,
    check_size,
    check_vocabulary,
    check_context,
)
"""Facts of what every command with engines and a trainer starts: addresses, devices, and the model in both."""
FACTS: tuple[Asked, ...] = (
    check_trainable,
    check_correction,
    check_algorithm,
    check_training_engine,
    check_dtype,
    check_training_job,
    check_routing_replay,
    check_sinks,
    check_lengths,
    check_sampling,
    check_capacity,
    check_turns,
    *PARTS,
    check_shared_memory,
    check_room,
    check_reward,
    check_data,
    check_curriculum,
    check_sources,
    check_loop,
    check_program,
    check_template,
    check_teachers,
    check_sandbox,
    check_harbor_tasks,
)
TRIALS: tuple[Asked, ...] = (
    check_versions,
    check_open_files,
    check_threads,
    check_concurrency,
    check_advertised,
    check_memory,
    check_driver,
    check_wire,
    check_gpus,
    check_disk,
    check_stop_grace,
    check_own_redis,
    check_packing,
    check_prompts,
    check_score,
    check_search,
    check_containment,
)
EVALUATION: tuple[Asked, ...] = (
    check_ports,
    check_redis,
    check_engine,
    check_model_here,
    check_vocabulary,
    check_context,
    check_reward,
    check_sandbox,
    check_loop,
    check_template,
)
"""Checks of what would end an evaluation, which needs no trainer, no step and none of the recipe's own data."""
SERVICE: tuple[Asked, ...] = (check_service, check_keys, check_dtype, *PARTS)
"""Facts of `penstock serve`, which has no tasks, agent workers or boxes."""
SERVICE_TRIALS: tuple[Asked, ...] = (
    check_versions,
    check_open_files,
    check_threads,
    check_service_memory,
    check_driver,
    check_gpus,
    check_disk,
    check_own_redis,
)
JOINING: tuple[Asked, ...] = (
    check_versions,
    check_open_files,
    check_driver,
    check_gpus,
    check_model,
    check_vocabulary,
    check_template,
    check_loop,
    check_sandbox,
    check_search,
)
"""Checks of a machine that joins a running run with servers or workers."""
OF_THIS_MACHINE: frozenset[Asked] = frozenset(
    (check_ports, check_devices, check_dtype, check_engine, check_trainer, check_size, check_shared_memory, check_room)
)
"""They say nothing about a run whose roles are elsewhere."""
BESIDE: frozenset[Asked] = frozenset((check_sandbox,))
"""They mostly wait for child processes, so they run in a thread from the start, parallel to other checks."""


def run_checks(config: RunConfig, *, here: bool = True) -> Iterator[Check]:
    """Yield the checks that refuse a run, cheapest first, one at a time so that a person sees them come.

    `here`: the roles run on this machine.
    """
    if here:
        return _ask([check_model_here if check is check_model else check for check in FACTS], config)
    return _ask([check for check in FACTS if check not in OF_THIS_MACHINE], config)


def all_checks(config: RunConfig) -> Iterator[Check]:
    return _ask([*FACTS, *TRIALS], config)


def service_checks(config: RunConfig, *, with_trials: bool = True) -> Iterator[Check]:
    return _ask([*SERVICE, *(SERVICE_TRIALS if with_trials else ())], config)


def joining_checks(config: RunConfig) -> Iterator[Check]:
    return _ask(JOINING, config)


def evaluation_checks(config: RunConfig) -> Iterator[Check]:
    return _ask(EVALUATION, config)


def refuse_doomed(checks: Iterable[Check]) -> None:
    """Raises `ConfigError` that names every check that fails, with its fix."""
    if failed := [check for check in checks if not check.ok]:
        raise ConfigError("\n".join(f"{check.name}: {check.found}\n  fix: {check.fix}" for check in failed))


def _ask(checks: Sequence[Asked], config: RunConfig) -> Iterator[Check]:
    allow_imports_from(Path.cwd())  # as workers do: a recipe's tools and rewards may lie there
    with ThreadPoolExecutor(len(BESIDE)) as threads:
        begun = {check: threads.submit(check, config) for check in checks if check in BESIDE}
        for check in checks:
            yield from _listed(begun[check].result() if check in begun else check(config))


def _listed(result: Found) -> Iterable[Check]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Check) else result
