"""The text of the batch scripts, from the options of the command line. Writes and submits nothing."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from penstock.common import is_loopback
from penstock.deploy.config import RunConfig
from penstock.deploy.placements.slurm.placement import JobLayout
from penstock.deploy.preflight.stop_grace import SLURM_S, head_grace_s, with_stop_grace
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import trainer_stop_s
from penstock.deploy.run.weights_folder import local_weights_prefix
from penstock.deploy.run_dir import RunDir

Runtime = Literal["pyxis", "apptainer"]


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One Slurm job. Checked when made; raises `ConfigError` naming the option."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Time limit as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS; None: the partition's own limit."""
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    """0: all of each node (`--exclusive`)."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, without their dashes: ``qos=high``."""
    setup: Sequence[str] = ()
    """Lines of shell that run first, on the job's first node."""
    container: str | None = None
    runtime: Runtime = "pyxis"
    mounts: Sequence[Path] = ()
    """Folders that containers see besides those of the recipe."""
    interface: str | None = None
    """Network interface by whose address a node is reached; None: the address that Slurm itself uses."""

    def __post_init__(self) -> None:
        if self.interface is not None and not re.fullmatch(r"[\w.-]{1,15}", self.interface):
            raise ConfigError(f"--interface {self.interface!r}: the name of one network interface, such as ib0")
        for option in self.sbatch:
            if not option or option.startswith("-") or "\n" in option:
                raise ConfigError(f"--sbatch {option!r}: write it without dashes, for example --sbatch qos=high")
        for line in self.setup:
            if "\n" in line:
                raise ConfigError("--setup: one line each; give it several times")
        for folder in self.mounts:
            if not folder.is_absolute() or "," in str(folder) or ":" in str(folder):
                raise ConfigError(f"--mount {folder}: an absolute path without commas and colons")

    def directives(self) -> list[str]:
        """Lines after ``#SBATCH --`` that every job has."""
        named = (("partition", self.partition), ("account", self.account), ("time", self.time))
        lines = [f"{name}={value}" for name, value in named if value]
        lines += ["ntasks-per-node=1", f"cpus-per-task={self.cpus_per_node}" if self.cpus_per_node else "exclusive"]
        lines += [f"gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        return [*lines, *self.sbatch]


@dataclass(frozen=True, slots=True)
class SlurmRecipe:
    """A recipe and its overrides, as on the command line."""

    path: Path
    overrides: Sequence[str]
    config: RunConfig


def run_script(recipe: SlurmRecipe, job: SlurmJob, at: JobLayout, *, sandbox: bool, max_requeues: int) -> str:
    """Return the batch script of a whole run. Raises `ConfigError`."""
    config, run = recipe.config, RunDir.of(recipe.config)
    url = config.transfer_queue.url
    if url and urlsplit(url).password:
        raise ConfigError(
            "transfer_queue.url holds a password, and command lines are for everybody to read: "
            "take it out and set PENSTOCK_REDIS_PASSWORD"
        )
    signal_s = head_grace_s(config, SLURM_S)
    directives = [
        f"job-name=penstock-{config.name}",
        f"nodes={at.nodes}",
        f"chdir={Path.cwd()}",
        f"output={run.logs}/slurm.log",
        "open-mode=append",
        "requeue",
        f"signal=B:TERM@{signal_s}",
        "dependency=singleton",  # a second job of this run waits until the first is over, and continues with it
        *job.directives(),
    ]
    values = {
        "name": config.name,
        "run": str(run.root),
        "local_weights": str(local_weights_prefix(config)),
        "picture": list(_picture(at, url, sandbox=sandbox)),
        "directives": directives,
        "url": url,
        "own_redis": url is None,
        "appendfsync": config.transfer_queue.appendfsync,
        "at": at,
        "recipe": str(recipe.path.resolve()),
        "overrides": shlex.join([*recipe.overrides, *head_overrides(config)]),
        "sandbox": sandbox,
        "sandbox_overrides": "".join(f" {shlex.quote(o)}" for o in recipe.overrides if o.startswith("sandbox.")),
        "max_requeues": max_requeues,
        "signal_s": signal_s,
        "linger_s": math.ceil(trainer_stop_s(with_stop_grace(config).trainer)),
        **_common(config, job, recipe.path),
    }
    return _render("run.sbatch.j2", values)


def join_script(
    run: RunDir,
    config: RunConfig,
    job: SlurmJob,
    *,
    array: str,
    servers: int,
    workers: int,
    gpus_per_server: int,
    wait_s: int,
) -> str:
    """The array job that joins the living run of that folder. Raises `ConfigError`."""
    if not servers + workers:
        raise ConfigError("--servers 0 --workers 0: nothing would join")
    if gpus_per_server * servers > job.gpus_per_node:
        raise ConfigError(
            f"{servers} server(s) of {gpus_per_server} GPU(s) need --gpus-per-node {gpus_per_server * servers}"
        )
    if servers and config.rollout.weight_transport == "shm":
        raise ConfigError(
            f"run {config.name} has rollout.weight_transport=shm, which reaches no other machine: continue it with "
            "rollout.weight_transport=http (`penstock slurm` chooses that by itself)"
        )
    directives = [
        f"job-name=penstock-{config.name}-join",
        f"array={array}",
        "nodes=1",
        f"chdir={Path.cwd()}",
        f"output={run.logs}/join-%A_%a.log",
        "open-mode=append",
        "requeue",
        "signal=B:TERM@30",
        *job.directives(),
    ]
    values = {
        "name": config.name,
        "run": str(run.root),
        "directives": directives,
        "servers": servers,
        "workers": workers,
        "gpus_per_server": gpus_per_server,
        "gpus_per_node": job.gpus_per_node,
        "wait_s": wait_s,
        **_common(config, job, None),
    }
    return _render("join.sbatch.j2", values)


def head_overrides(config: RunConfig) -> list[str]:
    """The head's overrides of the recipe: its servers and workers are elsewhere, and reach it over the network."""
    rollout = config.rollout
    settings = [f"runs_dir={Path(config.runs_dir).resolve()}", "rollout.servers=0", "agent.workers=0"]
    settings += ["rollout.evaluation_server=false"] if rollout.evaluation_server else []
    settings += ["rollout.host=0.0.0.0"] if is_loopback(rollout.host) else []
    settings += ["rollout.weights_host=0.0.0.0"] if is_loopback(rollout.weights_host) else []
    return [*settings, *(["rollout.weight_transport=http"] if rollout.weight_transport == "shm" else [])]


def _common(config: RunConfig, job: SlurmJob, recipe: Path | None) -> dict[str, Any]:
    options: list[str] = []
    if job.container and job.runtime == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in _mounts(config, job, recipe))
        options = [f"image={job.container}", f"mounts={mounts}", f"workdir={Path.cwd()}"]
    return {
        "setup": list(job.setup),
        "interface": job.interface,
        "penstock": _command(config, job, recipe),
        # Quoted whatever they hold: a comma in an array looks like a mistake to people and to shellcheck.
        "container": "".join(" '--container-" + option.replace("'", "'\\''") + "'" for option in options),
        "rollout_restarts": config.rollout.max_restarts,
        "agent_restarts": config.agent.max_restarts,
    }


def _command(config: RunConfig, job: SlurmJob, recipe: Path | None) -> str:
    if not job.container:
        return shlex.join([sys.executable, "-m", "penstock.deploy.cli"])
    if job.runtime == "pyxis":
        return "penstock"
    binds = [word for folder in _mounts(config, job, recipe) for word in ("--bind", str(folder))]
    gpus = ["--nv"] if job.gpus_per_node else []
    return shlex.join(["apptainer", "exec", *gpus, *binds, "--pwd", str(Path.cwd()), job.container, "penstock"])


def _mounts(config: RunConfig, job: SlurmJob, recipe: Path | None) -> list[Path]:
    """Folders that the roles read and write, none inside another."""
    named = [config.model, config.data.train, config.data.eval, *config.agent.loops, config.agent.reward]
    files = [Path(str(name).partition(".py:")[0]) for name in named if str(name).startswith("/")]
    folders = [file if file.is_dir() else file.parent for file in files]
    folders += [Path(config.runs_dir).resolve(), Path.cwd(), *job.mounts]
    folders += [recipe.resolve().parent] if recipe is not None else []
    return sorted({one for one in folders if not any(other in one.parents for other in folders)})


def _picture(at: JobLayout, url: str | None, *, sandbox: bool) -> Iterator[str]:
    """The job's nodes in a few lines."""
    queue = "queue (redis-server)" if url is None else f"(the queue is {url})"
    yield f"node 0        {queue}, head (penstock run) with {at.ranks_per_node} trainer rank(s)"
    for node in range(1, at.trainer_nodes):
        yield f"node {node}        {at.ranks_per_node} trainer rank(s)"
    last = at.nodes - 1
    nodes = f"node {last}   " if at.first_other == last else f"nodes {at.first_other} - {last}"
    boxes = ", a sandbox server on the last" if sandbox else ""
    yield f"{nodes}     {at.servers} rollout server(s), {at.workers} agent worker(s) in turn{boxes}"


def _render(template: str, values: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("penstock.deploy.placements.slurm"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - shell, not HTML: values are quoted by the filter q
    )
    environment.filters["q"] = shlex.quote
    return environment.get_template(template).render(values)
