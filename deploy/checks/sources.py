"""The data sources of a run's rows, for whoever needs something of each."""

from __future__ import annotations

from penstock.deploy.config import RunConfig
from penstock.deploy.data.generate import PREFIX


def data_sources(config: RunConfig) -> set[str]:
    """Every data_source of the training data; none where it is generated for the run, or is no dataset."""
    from penstock.trainer.data import DataError, load_rows

    if config.data.train.startswith(PREFIX):
        return set()
    try:
        return {row.data_source for row in load_rows(config.data.train)}
    except DataError:
        return set()  # `check_data` says so
