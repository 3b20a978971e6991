"""Whether the packages and programs that the run's parts need are there, in versions that work."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
from importlib import metadata
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, skipped
from penstock.rollout_server import RolloutConfig

TOLD = ("torch", "transformers", "redis", "numpy")
TRAINER = ("torch", "safetensors", "tensorboard", "matplotlib")


def check_engine(config: RunConfig) -> Check:
    if config.rollout.servers == 0:
        return Check("rollout.engine", True, "no server on this machine")
    if config.rollout.engine == "hf":
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        return Check(
            "rollout.engine", not missing, f"hf, missing {missing}" if missing else "hf", "pip install 'penstock[hf]'"
        )
    return asyncio.run(_check_stock_server(config.rollout))


async def _check_stock_server(config: RolloutConfig) -> Check:
    """Asks the environment that the engine would use: is the server in it, and new enough?"""
    from penstock.rollout_server import EngineError
    from penstock.rollout_server.engines import sglang_server, vllm_server

    try:
        if config.engine == "vllm":
            found: Any = await vllm_server.find_installation(config)
        else:
            found = await sglang_server.find_installation(config)
    except EngineError as error:
        return Check("rollout.engine", False, config.engine, str(error))
    return Check("rollout.engine", True, f"{config.engine} {found.version} in {found.python}")


def check_trainer(config: RunConfig) -> Check:
    missing = [name for name in TRAINER if not importlib.util.find_spec(name)]
    return Check(
        "trainer", not missing, f"missing {missing}" if missing else "torch found", "pip install 'penstock[train]'"
    )


def check_versions(_config: RunConfig) -> Check:
    """Every package that Penstock's core names, against the range that it is tested with."""
    from packaging.requirements import Requirement

    told = ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in TOLD)])
    try:
        own, needed = metadata.version("penstock"), metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return skipped("versions", f"{told}; penstock runs from its folder and is not installed: no ranges to compare")
    core = [one for one in map(Requirement, needed) if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [f"{one.name} {_version(one.name)} (wanted {one.specifier})" for one in core if not _fits(one)]
    mend = "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in core if not _fits(one))
    return Check("versions", not wrong, ", ".join(wrong) or f"penstock {own}, {told}", mend)


def _fits(needed: Any) -> bool:
    found = _version(needed.name)
    return found != "missing" and needed.specifier.contains(found, prereleases=True)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
