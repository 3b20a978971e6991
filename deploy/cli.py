"""The `penstock` command line. Heavy imports happen inside commands: `--help` loads no torch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.deploy.commands import config, data, queue
from penstock.deploy.commands.bench import bench
from penstock.deploy.commands.dashboard import dashboard
from penstock.deploy.commands.export import export
from penstock.deploy.commands.rehearse import rehearse
from penstock.deploy.commands.replay import replay
from penstock.deploy.commands.reward_server import reward_server
from penstock.deploy.commands.search_server import search_server
from penstock.deploy.commands.simulate import simulate
from penstock.deploy.load_config import ConfigError

app = typer.Typer(
    help="Asynchronous, disaggregated reinforcement learning for agents that use tools.",
    epilog="First run: penstock run recipes/calculator.yaml    Every key: docs/configuration.md",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(queue.app, name="queue")
train_app = typer.Typer(invoke_without_command=True)
app.add_typer(train_app, name="train")
app.command()(bench)
app.command()(search_server)
app.command()(dashboard)
app.command()(rehearse)
app.command()(reward_server)
app.command()(simulate)

Recipe = Annotated[Path, typer.Argument(help="A recipe: one YAML file, see recipes/.", metavar="RECIPE")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")]
LedgerUrl = Annotated[str | None, typer.Option("--ledger", help="redis:// URL of the run's ledger [PENSTOCK_LEDGER].")]
WaitS = Annotated[
    float,
    typer.Option("--wait-s", min=0, help="Wait so many seconds for a ledger that is away or a run that has not begun."),
]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run [PENSTOCK_RUN].")]


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on with an earlier run of this name.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved recipe and what it means; start nothing.")] = False,
) -> None:
    """Train: start and supervise every part of a recipe on this machine.

    Example: penstock run recipes/calculator.yaml name=mine max_staleness=sync trainer.lr=3e-4
    """
    from penstock.deploy.commands.run import run_recipe

    raise typer.Exit(run_recipe(recipe, overrides or [], resume=resume, dry_run=dry_run))


@app.command()
def doctor(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check that this machine can run a recipe, and say what to change where it cannot."""
    from penstock.deploy.commands.run import examine

    raise typer.Exit(examine(recipe, overrides or []))


@app.command()
def rollout(
    name: Annotated[
        str | None, typer.Option(help="Unique in the run; default: rollout- and this machine's name.")
    ] = None,
    ledger: LedgerUrl = None,
    run: RunName = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: the recipe's.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: a free one; default: the recipe's.")] = None,
    *,
    evaluates: Annotated[bool, typer.Option(help="Take evaluations alone, each at one version.")] = False,
    wait_s: WaitS = 0.0,
) -> None:
    """Start one rollout server (sidecar and engine) and join a running ledger."""
    from penstock.deploy import roles

    own = name or f"rollout-{socket.gethostname()}"
    _run(lambda: roles.rollout(_link(ledger, run), own, host, port, evaluates=evaluates, wait_s=wait_s))


@app.command()
def agent(
    name: Annotated[
        str | None, typer.Option(help="Unique in the run; default: agent- and this machine's name.")
    ] = None,
    ledger: LedgerUrl = None,
    run: RunName = None,
    wait_s: WaitS = 0.0,
) -> None:
    """Start one agent worker and join a running ledger."""
    from penstock.deploy import roles

    _run(lambda: roles.agent(_link(ledger, run), name or f"agent-{socket.gethostname()}", wait_s=wait_s))


@train_app.callback()
def train(context: typer.Context, ledger: LedgerUrl = None, run: RunName = None, wait_s: WaitS = 0.0) -> None:
    """Start the trainer (torchrun with trainer.ranks processes) and join a running ledger."""
    from penstock.deploy.commands.train import exec_torchrun

    if context.invoked_subcommand is None:
        _guarded(lambda: exec_torchrun(_link(ledger, run), wait_s=wait_s))


train_app.command()(replay)
train_app.command()(export)


@app.command(hidden=True)
def train_rank() -> None:
    """One rank of the trainer; started by torchrun."""
    from penstock.deploy import roles

    _run(lambda: roles.train_rank(_link(None, None)))


@app.command()
def sandbox(
    overrides: Annotated[list[str] | None, typer.Argument(help="sandbox.key=value …", metavar="[KEY=VALUE]…")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe whose sandbox section says how; only that.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
) -> None:
    """Start a sandbox server: boxes for tool code over HTTP, for agent workers on other machines [PENSTOCK_TOKEN].

    Example: penstock sandbox sandbox.max_boxes=32 "sandbox.server.warm={default: 4}"
    """
    from penstock.deploy import roles
    from penstock.deploy.load_config import load_sandbox

    _run(lambda: roles.sandbox(load_sandbox(recipe, overrides or []), host, port))


def _link(ledger: str | None, run: str | None) -> Any:
    from penstock.deploy.link import Link

    return Link.from_environment(ledger, run)


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    from penstock.deploy.roles import run_role

    _guarded(lambda: run_role(main))


def _guarded(work: Callable[[], None]) -> None:
    """Mistakes of people are one message, not a traceback."""
    try:
        work()
    except ConfigError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
