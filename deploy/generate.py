"""Generated datasets: `data.train: generate:NAME:COUNT` is written to the run's folder before anything starts."""

from __future__ import annotations

from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.data import GENERATORS
from penstock.deploy.load_config import ConfigError
from penstock.deploy.run_dir import RunDir

PREFIX = "generate:"


def materialise_data(config: RunConfig, run: RunDir) -> RunConfig:
    """The same configuration with generated datasets replaced by the files they were written to."""
    train = _materialise(config.data.train, "train", config.seed, run.data)
    evaluation = config.data.eval and _materialise(config.data.eval, "eval", config.seed, run.data)
    return config.model_copy(update={"data": config.data.model_copy(update={"train": train, "eval": evaluation})})


def _materialise(spec: str, split: str, seed: int, directory: Path) -> str:
    if not spec.startswith(PREFIX):
        return spec
    name, _, count = spec.removeprefix(PREFIX).partition(":")
    if name not in GENERATORS or not count.isdigit() or int(count) < 1:
        known = ", ".join(sorted(GENERATORS))
        raise ConfigError(
            f"data.{split}: {spec!r} is not generate:NAME:COUNT; NAME is one of {known}, COUNT at least 1"
        )
    path = directory / f"{split}.parquet"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        GENERATORS[name](path, split=split, count=int(count), seed=seed)
    return str(path)
