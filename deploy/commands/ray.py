"""`penstock ray`: show and scale a run that `penstock run --on ray` started."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.deploy.commands.shared import user_errors
from penstock.deploy.recipe_tree import ConfigError

app = typer.Typer(help="Runs on a Ray cluster: show and scale their roles.", no_args_is_help=True)
Address = Annotated[
    str | None,
    typer.Option("--ray-address", help="HOST:PORT of the cluster [RAY_ADDRESS]; default: the one on this machine."),
]
RunArgument = Annotated[str, typer.Argument(help="Name of the run.", metavar="RUN")]
ANSWER_S = 15.0
LOOK_S = 0.5


@app.command()
def status(run: RunArgument, ray_address: Address = None) -> None:
    """Show where each role of a running run is, as JSON.

    Example: penstock ray status calculator
    """
    _ask_and_print(run, ray_address, {}, 0.0)


@app.command()
def scale(
    run: RunArgument,
    counts: Annotated[list[str], typer.Argument(help="rollout=4 agent=3", metavar="KIND=COUNT…")],
    ray_address: Address = None,
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, help="Maximum seconds to wait until it is done.")] = 30.0,
) -> None:
    """Add or remove rollout servers and agent workers of a running run, newest first; nothing is lost.

    Added roles wait until the cluster has resources for them. Example: penstock ray scale calculator rollout=4
    """
    from penstock.deploy.placements.ray.registry import parse_counts

    with user_errors():
        count_by_kind = parse_counts(counts)
    _ask_and_print(run, ray_address, count_by_kind, wait_s)


def _ask_and_print(run: str, address: str | None, count_by_kind: Mapping[str, int], wait_s: float) -> None:
    from penstock.deploy.placements.ray.cluster import connect

    try:
        with user_errors():
            connect(address, run)
            print(json.dumps(_ask(run, count_by_kind, wait_s), indent=2))
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def _ask(run: str, count_by_kind: Mapping[str, int], wait_s: float) -> dict[str, Any]:
    """Requests the counts, if any, and returns the registry's state once they are met or after `wait_s`.

    Raises `ConfigError`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from penstock.deploy.placements.ray.registry import find_registry

    registry = find_registry(run)
    deadline = time.monotonic() + wait_s
    try:
        ray.get(registry.ask.remote(dict(count_by_kind)), timeout=ANSWER_S)
        while True:
            shown: dict[str, Any] = ray.get(registry.shown.remote(), timeout=ANSWER_S)
            met = count_by_kind.items() <= shown.get("count", {}).items()
            if met or time.monotonic() >= deadline:
                return shown
            time.sleep(LOOK_S)
    except (GetTimeoutError, RayActorError) as error:
        raise ConfigError(f"run {run} does not answer, it may have just ended: {error}") from error
