"""`penstock run`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.deploy.checks import run_checks
from penstock.deploy.config import RunConfig
from penstock.deploy.load_config import ConfigError, dump_config, load_config
from penstock.transfer_queue.ledger import LedgerError

console = Console(stderr=True, highlight=False)


def run_recipe(recipe: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> int:
    """Returns the exit status: 0 done, 1 the run failed, 2 the recipe is wrong, 130 interrupted."""
    from penstock.deploy.launch import Interrupted, launch
    from penstock.deploy.processes import RoleFailed
    from penstock.deploy.report import StalledRun, describe

    try:
        config = load_config(recipe, overrides)
        if dry_run:
            print(dump_config(config))
            console.print(describe(config), markup=False, soft_wrap=True)
            return 0
        _refuse_doomed(config)
        summary = asyncio.run(launch(config, resume=resume))
    except ConfigError as error:
        return _complain(str(error), 2)
    except (RoleFailed, StalledRun, LedgerError) as error:
        return _complain(str(error), 1)
    except (Interrupted, KeyboardInterrupt):
        return _complain(f"interrupted; go on with: penstock run {recipe} {' '.join(overrides)} --resume", 130)
    console.print(summary.read_text(), markup=False, soft_wrap=True)
    console.print(f"done: {summary}", markup=False, soft_wrap=True)
    return 0


def _refuse_doomed(config: RunConfig) -> None:
    failed = [check for check in run_checks(config) if not check.ok]
    if failed:
        raise ConfigError("\n".join(f"{check.name}: {check.found}\n  mend: {check.mend}" for check in failed))


def _complain(message: str, status: int) -> int:
    console.print(message, style="red", markup=False, soft_wrap=True)
    return status
