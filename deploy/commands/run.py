"""`penstock run`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from penstock.common import uncollected
from penstock.deploy.config import RunConfig, dump_config, load_config
from penstock.deploy.preflight.stop_grace import with_stop_grace
from penstock.deploy.preflight.suite import refuse_doomed, run_checks
from penstock.deploy.preflight.turns import check_turns, refuse_elsewhere
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.console import HeadConsole
from penstock.deploy.run.supervisor import Placement
from penstock.deploy.run_dir import RunDir, has_begun, require_run
from penstock.transfer_queue import QueueError, RunTaken

console = HeadConsole()


def run_recipe(
    recipe: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    resume_if_any: bool = False,
    dry_run: bool,
    as_json: bool = False,
    on_ray: bool = False,
    ray_address: str | None = None,
) -> int:
    """Returns the exit status: 0 done, 1 the run failed, 2 the recipe is wrong, 130 interrupted.

    `resume` requires an earlier run, `resume_if_any` continues one if there is one.
    """
    with uncollected():
        from penstock.deploy.run.launcher import Interrupted, launch
        from penstock.deploy.run.processes import RoleFailed
        from penstock.deploy.run.summary import describe_end
        from penstock.deploy.run.supervisor import StalledRun, VersionRefused

    where = f" --on ray{f' --ray-address {ray_address}' if ray_address else ''}" if on_ray else ""
    again = f"{' '.join(['penstock run', str(recipe), *overrides, '--resume'])}{where}"
    config: RunConfig | None = None
    try:
        config = load_config(recipe, overrides)
        if dry_run:
            _explain(config)
        if on_ray:
            refuse_elsewhere(config, "Ray")
        _refuse_doomed(config, here=not on_ray, resume=resume)
        if dry_run:
            return 0
        resume = resume or resume_if_any
        if resume and (message := _nothing_left(config, overrides)):
            console.print(message, markup=False, soft_wrap=True)
            if as_json:
                print(RunDir.of(config).summary.read_text(), end="")
            return 0
        placement = _ray_placement(ray_address) if on_ray else None
        summary = asyncio.run(launch(with_stop_grace(config), resume=resume, placement=placement))
    except (ConfigError, RunTaken) as error:
        return console.complain(str(error), 2, as_json=as_json)
    except (RoleFailed, StalledRun, VersionRefused, QueueError, OSError) as error:  # OSError: a full disk
        hint = f"\nonce the cause is corrected, continue with: {again}" if _can_continue(config) else ""
        return console.complain(f"{error}{hint}", 1, as_json=as_json)
    except (Interrupted, KeyboardInterrupt):
        hint = f"; continue with: {again}" if _can_continue(config) else " before the run began: nothing is kept"
        return console.complain(f"interrupted{hint}", 130, as_json=as_json)
    if as_json:
        print(summary.read_text(), end="")
    else:
        console.print(
            describe_end(json.loads(summary.read_text()), RunDir(summary.parent)), markup=False, soft_wrap=True
        )
    return 0


def _explain(config: RunConfig) -> None:
    """Prints the resolved recipe, and what it means."""
    from penstock.deploy.run.report import describe

    print(dump_config(config))
    console.print(describe(config), markup=False, soft_wrap=True)
    for check in check_turns(config):
        console.print(f"{check.name}: {check.found}", markup=False, soft_wrap=True)


def _can_continue(config: RunConfig | None) -> bool:
    """`config` is None if the recipe was still read."""
    return config is not None and has_begun(RunDir.of(config))


def _nothing_left(config: RunConfig, overrides: Sequence[str] = ()) -> str:
    """Return a sentence if all steps of the run in this folder are trained, else an empty text. It names those of
    `overrides` that the run did not have."""
    from penstock.deploy.run.identity import changed_settings

    run = RunDir.of(config)
    try:
        summary = json.loads(run.summary.read_text())
        if summary["steps"] < config.trainer.steps or not summary["ended"].startswith("all "):
            return ""
    except (OSError, ValueError, KeyError, AttributeError):
        return ""
    keys = tuple(f"{override.partition('=')[0]}: " for override in overrides)
    changes = [change for change in changed_settings(run, with_stop_grace(config)) if change.startswith(keys)]
    sentence = f"{config.name}: {summary['ended']}, nothing is left to do; a larger trainer.steps continues the run"
    return f"{sentence}; without effect: {', '.join(changes)}" if changes else sentence


def _ray_placement(address: str | None) -> Placement:
    """Raises `ConfigError`."""
    from penstock.deploy.placements.ray.cluster import INSTALL

    try:
        from penstock.deploy.placements.ray.placement import RayPlacement
    except ImportError as error:
        raise ConfigError(f"{INSTALL} ({error})") from None
    return RayPlacement(address)


def _refuse_doomed(config: RunConfig, *, here: bool, resume: bool) -> None:
    """`here`: the roles run on this machine. `resume`: there must be an earlier run. Raises `ConfigError`."""
    if resume:
        require_run(RunDir.of(config))
    with uncollected():  # some import what the run needs later
        checks = list(run_checks(config, here=here))
    for check in checks:
        if check.warns:
            console.print(f"{check.name}: {check.found}; {check.fix}", style="yellow", markup=False, soft_wrap=True)
    refuse_doomed(checks)
