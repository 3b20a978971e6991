"""`penstock slurm RECIPE` and `penstock slurm join RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.deploy.commands.shared import Overrides, Recipe, user_errors
from penstock.deploy.config import load_config
from penstock.deploy.placements.slurm.placement import place, server_gpus
from penstock.deploy.placements.slurm.script import Runtime, SlurmJob
from penstock.deploy.preflight.turns import refuse_elsewhere
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run_dir import RunDir


class _RecipeFirst(TyperGroup):
    """Makes `penstock slurm RECIPE` mean `penstock slurm run RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RecipeFirst,
    help="Run a recipe under Slurm: penstock slurm RECIPE [KEY=VALUE]… --nodes N, see `penstock slurm run --help`.",
    no_args_is_help=True,
)
Partition = Annotated[str | None, typer.Option(help="Slurm partition; default: the cluster's.")]
Account = Annotated[str | None, typer.Option(help="Slurm account.")]
Time = Annotated[str | None, typer.Option(help="Time limit in Slurm's format, 12:00:00; the run continues after it.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each node; 0: CPUs only.")]
Cpus = Annotated[int, typer.Option("--cpus-per-node", min=0, help="CPUs of each node; 0: the whole node.")]
ServerGpus = Annotated[
    int | None,
    typer.Option("--gpus-per-server", min=1, help="GPUs of a rollout server; default: its tensor_parallel_size, or 1."),
]
Container = Annotated[str | None, typer.Option(help="Image that every role runs in; it holds `penstock`.")]
RuntimeOption = Annotated[Runtime, typer.Option("--container-runtime", help="What starts the image.")]
Mounts = Annotated[list[Path] | None, typer.Option("--mount", help="One more folder for containers; repeatable.")]
Sbatch = Annotated[list[str] | None, typer.Option(help="Any other option of sbatch: qos=high; repeatable.")]
Setup = Annotated[list[str] | None, typer.Option(help="A line of shell to begin with: module load cuda; repeatable.")]
Interface = Annotated[
    str | None,
    typer.Option(help="Network interface that carries the run's traffic, such as ib0; default: Slurm's NodeAddr."),
]
Print = Annotated[bool, typer.Option("--print", help="Print the script; write and submit nothing.")]


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job; the first is the trainer's.")] = 1,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    gpus_per_node: Gpus = 0,
    cpus_per_node: Cpus = 0,
    gpus_per_server: ServerGpus = None,
    trainer_nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the trainer; default: as many as its ranks need GPUs.")
    ] = None,
    sandbox_server: Annotated[
        bool, typer.Option("--sandbox-server", help="One sandbox server for all workers, on the last node.")
    ] = False,
    container: Container = None,
    container_runtime: RuntimeOption = "pyxis",
    mount: Mounts = None,
    sbatch: Sbatch = None,
    setup: Setup = None,
    interface: Interface = None,
    max_requeues: Annotated[int, typer.Option(min=0, help="Maximum number of requeues.")] = 100,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run of this name.")] = False,
    print_: Print = False,
) -> None:
    """Write one batch script into the run's folder and submit it: as many rollout servers and agent workers as the
    recipe says, on the nodes after the trainer's. The run continues automatically after a time limit or preemption.

    Example: penstock slurm recipes/calculator.yaml rollout.servers=8 --nodes 3 --gpus-per-node 4 --time 12:00:00
    """
    from penstock.deploy.placements.slurm.script import SlurmRecipe, run_script
    from penstock.deploy.placements.slurm.submit import submit, write_secrets

    with user_errors():
        job = SlurmJob(partition, account, time, gpus_per_node, cpus_per_node, sbatch or (), setup or (), container,
                  container_runtime, mount or (), interface)  # fmt: skip
        config = load_config(recipe, overrides or [])
        refuse_elsewhere(config, "Slurm")
        at = place(
            config, nodes, trainer_nodes=trainer_nodes, gpus_per_node=gpus_per_node, gpus_per_server=gpus_per_server
        )
        text = run_script(
            SlurmRecipe(recipe, overrides or [], config), job, at, sandbox=sandbox_server, max_requeues=max_requeues
        )
        if print_:
            print(text, end="")
            return
        folder = RunDir.of(config)
        if folder.config.exists() and not resume:
            raise ConfigError(f"name: {folder.root} holds an earlier run; --resume continues it, name=… starts another")
        folder.logs.mkdir(parents=True, exist_ok=True)
        write_secrets(folder.slurm, config)
        _print_submitted(submit(text, folder.slurm / "run.sbatch"), folder, folder.slurm / "run.sbatch")


@app.command()
def join(
    run_folder: Annotated[Path, typer.Argument(help="Folder of the running run, runs/NAME.", metavar="RUN")],
    *,
    array: Annotated[str, typer.Option(help="Indices of the array's tasks, as Slurm writes them: 0-7, or 0-7%4.")],
    servers: Annotated[int, typer.Option(min=0, help="Rollout servers of each task.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Agent workers of each task.")] = 0,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    gpus_per_node: Gpus = 0,
    cpus_per_node: Cpus = 0,
    gpus_per_server: ServerGpus = None,
    container: Container = None,
    container_runtime: RuntimeOption = "pyxis",
    mount: Mounts = None,
    sbatch: Sbatch = None,
    setup: Setup = None,
    interface: Interface = None,
    wait_s: Annotated[int, typer.Option(min=0, help="Seconds without the run after which a task ends.")] = 1800,
    print_: Print = False,
) -> None:
    """Add rollout servers and agent workers to a running run: an array job, one node per task.
    Cancel its tasks to remove them again; nothing is lost.

    Example: penstock slurm join runs/calculator --array 0-3 --gpus-per-node 1 --time 4:00:00
    """
    from penstock.deploy.placements.slurm.script import join_script
    from penstock.deploy.placements.slurm.submit import submit

    with user_errors():
        job = SlurmJob(partition, account, time, gpus_per_node, cpus_per_node, sbatch or (), setup or (), container,
                  container_runtime, mount or (), interface)  # fmt: skip
        folder = RunDir(run_folder.resolve())
        if not folder.config.is_file():
            raise ConfigError(f"{folder.root}: no run has started there (no config.yaml)")
        config = load_config(folder.config)
        gpus = (gpus_per_server or server_gpus(config.rollout)) if gpus_per_node and servers else 0
        text = join_script(
            folder, config, job, array=array, servers=servers, workers=workers, gpus_per_server=gpus, wait_s=wait_s
        )
        if print_:
            print(text, end="")
            return
        folder.slurm.mkdir(mode=0o700, exist_ok=True)
        _print_submitted(submit(text, folder.slurm / "join.sbatch"), folder, folder.slurm / "join.sbatch")


def _print_submitted(job: str, folder: RunDir, script: Path) -> None:
    typer.echo(f"job {job}: {script}")
    typer.echo(f"  logs: {folder.logs}/*.log    look: squeue --jobs {job}    end: scancel {job}", err=True)
