"""The `penstock` command line. Heavy imports happen inside commands: `--help` loads no torch."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from penstock.common import uncollected


def _hide_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C during the imports below, and theirs in the commands, ends with a word instead of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _hide_interrupt
with uncollected():
    import typer

    from penstock.deploy.commands import archive_questions, compose, config, data, kubernetes, model, queue, ray, slurm
    from penstock.deploy.commands.bisect import bisect
    from penstock.deploy.commands.clean import clean
    from penstock.deploy.commands.curriculum import curriculum
    from penstock.deploy.commands.dashboard import dashboard
    from penstock.deploy.commands.doctor import doctor
    from penstock.deploy.commands.prove import prove
    from penstock.deploy.commands.rehearse import rehearse
    from penstock.deploy.commands.replay import replay
    from penstock.deploy.commands.rescore import rescore
    from penstock.deploy.commands.servers import redis_server, reward_server, search_server, teacher_server
    from penstock.deploy.commands.shared import Overrides, Recipe, set_json, user_errors
    from penstock.deploy.commands.simulate import simulate
    from penstock.deploy.commands.start import init, quickstart, recipes
    from penstock.deploy.commands.status import status
    from penstock.deploy.commands.trace import trace
    from penstock.deploy.commands.training import bench, evaluate, export, serve, sft

app = typer.Typer(
    epilog="First run: penstock quickstart    A project: penstock init FOLDER    What ships: penstock recipes",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
START, TRAIN, CHECK, WATCH = "Start here", "Train and measure", "Check before a run", "Watch and steer a run"
CLUSTERS, ROLES = "Several machines", "Roles and servers of a run"
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    START: (quickstart, init, status, recipes),
    TRAIN: (sft, serve, replay, bisect, rescore, bench),
    CHECK: (doctor, rehearse, simulate),
    WATCH: (dashboard, trace, curriculum, prove, clean),
    ROLES: (redis_server, search_server, reward_server, teacher_server),
}
"""Groups of `penstock --help`, and the commands in each that are named as their function."""
for panel, commands in PANELS.items():
    for function in commands:
        app.command(rich_help_panel=panel)(function)
train_app = typer.Typer(invoke_without_command=True)
app.add_typer(data.app, name="data", rich_help_panel=START)
app.add_typer(config.app, name="config", rich_help_panel=START)
app.add_typer(model.app, name="model", rich_help_panel=START)
app.command(name="eval", rich_help_panel=TRAIN)(evaluate)
app.add_typer(queue.app, name="queue", rich_help_panel=WATCH)
app.add_typer(archive_questions.app, name="archive", rich_help_panel=WATCH)
app.add_typer(train_app, name="train", rich_help_panel=ROLES)
for name, group in (("slurm", slurm), ("ray", ray), ("compose", compose), ("kubernetes", kubernetes)):
    app.add_typer(group.app, name=name, rich_help_panel=CLUSTERS)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"penstock {metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous, disaggregated reinforcement learning for agents that use tools."""
    set_json(False)  # of a command before in this process


QueueUrl = Annotated[str | None, typer.Option("--queue", help="redis:// URL of the run's queue [PENSTOCK_QUEUE].")]
WaitS = Annotated[
    float,
    typer.Option("--wait-s", min=0, help="Seconds to wait for an unreachable queue or a run that has not started."),
]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run [PENSTOCK_RUN].")]


class Where(StrEnum):
    MACHINE = "machine"
    RAY = "ray"


@app.command(rich_help_panel=START)
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run of this name.")] = False,
    *,
    resume_if_any: Annotated[
        bool, typer.Option(help="Continue an earlier run of this name, or start it: for what starts jobs again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved recipe and what it means, check it as a start does.")
    ] = False,
    on: Annotated[
        Where, typer.Option(help="Where the roles run: on this machine, or on a Ray cluster.")
    ] = Where.MACHINE,
    ray_address: ray.Address = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json at the end, on the standard output.")
    ] = False,
) -> None:
    """Train: start and supervise every role of a recipe, on this machine or on a Ray cluster.

    Examples: penstock run recipes/calculator.yaml name=mine max_staleness=sync trainer.lr=3e-4

    penstock run recipes/calculator.yaml --on ray --ray-address 10.0.0.1:6379
    """
    with uncollected():
        from penstock.deploy.commands.run import run_recipe

    status = run_recipe(
        recipe,
        overrides or [],
        resume=resume,
        resume_if_any=resume_if_any,
        dry_run=dry_run,
        as_json=as_json,
        on_ray=on is Where.RAY,
        ray_address=ray_address,
    )
    raise typer.Exit(status)


@app.command(rich_help_panel=ROLES)
def rollout(
    name: Annotated[
        str | None, typer.Option(help="Unique in the run; default: rollout- and this machine's name.")
    ] = None,
    queue: QueueUrl = None,
    run: RunName = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: the recipe's.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: a free one; default: the recipe's.")] = None,
    *,
    evaluates: Annotated[bool, typer.Option(help="Serve only evaluations, each at one version.")] = False,
    lent: Annotated[bool, typer.Option(help="Compute on the trainer's devices, between its steps.")] = False,
    wait_s: WaitS = 0.0,
) -> None:
    """Start one rollout server (sidecar and engine) and join a running queue."""
    from penstock.deploy.run import roles

    own = name or f"rollout-{socket.gethostname()}"
    _run(lambda: roles.rollout(_link(queue, run), own, host, port, evaluates=evaluates, lent=lent, wait_s=wait_s))


@app.command(rich_help_panel=ROLES)
def agent(
    name: Annotated[
        str | None, typer.Option(help="Unique in the run; default: agent- and this machine's name.")
    ] = None,
    queue: QueueUrl = None,
    run: RunName = None,
    wait_s: WaitS = 0.0,
) -> None:
    """Start one agent worker and join a running queue."""
    from penstock.deploy.run import roles

    _run(lambda: roles.agent(_link(queue, run), name or f"agent-{socket.gethostname()}", wait_s=wait_s))


@train_app.callback()
def train(
    context: typer.Context,
    queue: QueueUrl = None,
    run: RunName = None,
    wait_s: WaitS = 0.0,
    *,
    nnodes: Annotated[
        int | None, typer.Option(min=1, help="Number of machines of the trainer [PENSTOCK_TRAIN_NODES].")
    ] = None,
    node_rank: Annotated[int, typer.Option(min=0, help="This machine's index; the head supervises 0.")] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT of the rendezvous on machine 0 [PENSTOCK_TRAIN_RENDEZVOUS].")
    ] = None,
) -> None:
    """Start the trainer (one process, or torchrun with trainer.ranks of them) and join a running queue.

    Over several machines: the same command on each, with its own --node-rank.
    """
    from penstock.deploy.commands.train import exec_trainer
    from penstock.deploy.run.plan import Rendezvous

    if context.invoked_subcommand is None:
        with user_errors():
            exec_trainer(_link(queue, run), Rendezvous.of(nnodes, node_rank, rdzv_endpoint), wait_s=wait_s)


train_app.command()(export)


@app.command(hidden=True)
def train_rank(
    *, alone: Annotated[bool, typer.Option(help="It is the only one, whatever a torchrun around it says.")] = False
) -> None:
    """One rank of the trainer; torchrun starts several."""
    from penstock.deploy.run import roles

    if alone:
        roles.leave_torchrun()
    _run(lambda: roles.train_rank(_link(None, None)))


ModelName = Annotated[str, typer.Option(help="The base model as clients call it.")]


@app.command(hidden=True)
def service_trainer(*, model_name: ModelName) -> None:
    """The trainer of `penstock serve`."""
    from penstock.deploy import serving
    from penstock.deploy.run import roles

    roles.leave_torchrun()
    _run(lambda: serving.service_trainer(_link(None, None), model_name))


@app.command(hidden=True)
def service_api(*, model_name: ModelName, host: str = "127.0.0.1", port: int = 0) -> None:
    """The API process of `penstock serve`."""
    from penstock.deploy import serving

    _run(lambda: serving.service_api(_link(None, None), host, port, model_name))


@app.command(hidden=True)
def sft_rank(folder: Path, *, alone: Annotated[bool, typer.Option(help="See train-rank.")] = False) -> None:
    """One rank of `penstock sft` in the folder of its run."""
    from penstock.deploy.run import roles
    from penstock.deploy.sft.rank import sft_rank as main

    if alone:
        roles.leave_torchrun()
    _run(lambda: main(folder))


@app.command(hidden=True)
def replay_rank(folder: Path, *, alone: Annotated[bool, typer.Option(help="See train-rank.")] = False) -> None:
    """One rank of `penstock replay` or `penstock rescore` in its folder."""
    from penstock.deploy.commands.replay import replay_rank as main
    from penstock.deploy.run import roles

    if alone:
        roles.leave_torchrun()
    _run(lambda: main(folder))


@app.command(hidden=True)
def sft_ranks(folder: Path) -> None:
    """Become torchrun with the ranks of `penstock sft`."""
    from penstock.deploy.sft.rank import exec_sft_ranks

    with user_errors():
        exec_sft_ranks(folder)


@app.command(rich_help_panel=ROLES)
def sandbox(
    overrides: Annotated[list[str] | None, typer.Argument(help="sandbox.key=value …", metavar="[KEY=VALUE]…")] = None,
    recipe: Annotated[Path | None, typer.Option(help="A recipe; only its sandbox section is read.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
) -> None:
    """Start a sandbox server: boxes for tool code over HTTP, for agent workers on other machines [PENSTOCK_TOKEN].

    Example: penstock sandbox sandbox.max_boxes=32 "sandbox.server.warm={default: 4}"
    """
    from penstock.deploy.config import load_sandbox
    from penstock.deploy.run import roles

    _run(lambda: roles.sandbox(load_sandbox(recipe, overrides or []), host, port))


def _link(queue: str | None, run: str | None) -> Any:
    from penstock.deploy.run.connection import RunConnection

    return RunConnection.from_environment(queue, run)


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    from penstock.deploy.run.roles import run_role

    with user_errors():
        run_role(main)


FIRST = ("quickstart", "init", "run", "status")
"""Commands at the top of `penstock --help`, in this order."""
app.registered_commands.sort(
    key=lambda command: next(
        (i for i, name in enumerate(FIRST) if name == getattr(command.callback, "__name__", "")), 9
    )
)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
