"""Whether the agent loops that the recipe and its rows name can be loaded."""

from __future__ import annotations

from pathlib import Path

from penstock.datasets import PREFIX
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check


def check_loop(config: RunConfig) -> Check | None:
    from penstock.agent_loops import LoadError, find_loop

    if not config.agent.workers:
        return None  # episodes are leased by somebody else
    names = [config.agent.loop, *sorted(_named_by_rows(config))]
    for name in names:
        try:
            find_loop(name, Path())
        except LoadError as error:
            return Check("agent.loop", False, name, str(error))
    return Check("agent.loop", True, ", ".join(names))


def _named_by_rows(config: RunConfig) -> set[str]:
    from penstock.trainer import DataError, load_rows

    files = [spec for spec in (config.data.train, config.data.eval) if spec and not spec.startswith(PREFIX)]
    try:
        return {row.agent_name for spec in files for row in load_rows(spec) if row.agent_name}
    except DataError:
        return set()  # `check_data` says so
