"""Checks of what data sources have for themselves: weights of a curriculum, settings of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.common import pattern_of
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.data import data_sources


def check_curriculum(config: RunConfig) -> Check | None:
    sources = data_sources(config)
    if config.data.curriculum is None or not sources:
        return None
    name = "data.curriculum"
    try:
        config.data.curriculum.check(sorted(sources))
    except ValueError as error:
        return Check(name, False, str(error), "name data sources of the data, see docs/curriculum.md")
    weights = (f"{source} {config.data.curriculum.of_source(source):g}" for source in sorted(sources))
    return Check(name, True, ", ".join(weights))


def check_sources(config: RunConfig) -> Iterator[Check]:
    """`agent.sources` and `trainer.sources`: that each is of some task."""
    for section, names in (("agent.sources", config.agent.sources), ("trainer.sources", config.trainer.sources)):
        if names:
            yield _check_names(section, names, data_sources(config))


def _check_names(section: str, names: Iterable[str], sources: set[str]) -> Check:
    """Data that is generated for the run has sources that nobody knows yet."""
    unused = [name for name in names if sources and all(pattern_of(source, [name]) is None for source in sources)]
    return Check(
        section,
        not unused,
        f"no data_source {', '.join(unused)}" if unused else ", ".join(names),
        f"the data has {', '.join(sorted(sources))}: correct the name, or leave it out",
    )
